"""Writes NAME_tokens.json: token ids of a GGUF file's tokenizer by llama.cpp.

llama.cpp shares no code with this project's tokenizer and reads the same GGUF file.
Run with Python 3.10 or newer in an environment of its own:

    pip install xllamacpp==2026.10.11549
    python tests/golden/make_tokens.py smollm2 MODEL.gguf

where MODEL.gguf is what ``python -m oscar_jax.fetch smollm2-135m`` prints; the same with gemma3 and
``gemma3-270m``.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp  # type: ignore[import-not-found]  # only here, never in the project

TEXTS = [
    "Hello, world!",
    "What is the capital of France?",
    "It's he'll they've I'm you'd WE'RE don't",
    "year 2024 cost 1234567.89 and 0x1F, 3rd, v2.0.1",
    "١٢٣ ४५६ ½ Ⅷ ²",
    "naïve café — “quotes” … ß ﬁ Å",
    "e\u0301 decomposed, é composed",
    "日本語のテキスト、中文文本。한국어 텍스트",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "🙂🚀👩‍👩‍👧‍👦🏳️‍🌈 emoji 🇫🇷 flags",
    "  two leading spaces and trailing  ",
    "tabs\tand\n\nnewlines\r\n   \n\tmixed \u00a0nbsp \u2003em",
    "",
    " ",
    "\n",
    "          ten spaces",
    "def f(x: int) -> int:\n    return x ** 2  # comment\n\n\nclass A:\n\tpass\n",
    'for (int i = 0; i < n; ++i) { printf("%d\\n", a[i]); }',
    "https://example.com/a/b?c=d&e=f#g user_name@mail.example snake_case camelCase",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text <|endoftext|>text<|im_end|> text",
    "<|im_start| > <|not_special|> <file_sep>a<repo_name>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "\u200bzero\u200dwidth\ufeffbom \x00nul \x7fdel",
    "$\\frac{a}{b} = \\sum_{i=0}^{n} x_i$ ≤ ≥ ≠ ∞ ∫",
    "<bos>one<eos>\n\n\ntwo\t\t\tthree <start_of_turn>user\nHi<end_of_turn> <unused7>",
    "<h1>A <em>tag</em></h1>\n<table><tr><td>1</td></tr></table>",
    "a \u2581 b \u2581\u2581 [multimodal] <0x41> \U0001fad8 \ue000",
    "\n \n  \n   x      y\t \t z" + " " * 40 + "end",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n",
]


def main() -> None:
    parameters = xllamacpp.CommonParams()
    name, parameters.model.path = sys.argv[1:]
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = 512, 1, False
    server = xllamacpp.Server(parameters)

    def ask(route: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            server.listening_address + route,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def ids(text: str) -> list[int]:
        return ask("/tokenize", content=text, add_special=False, parse_special=True)["tokens"]

    golden = {
        "by": f"llama.cpp, in xllamacpp {xllamacpp.__version__}",
        "texts": [{"text": text, "ids": ids(text)} for text in TEXTS],
    }
    rows = ",\n".join(json.dumps(row, ensure_ascii=True) for row in golden.pop("texts"))
    place = Path(__file__).with_name(f"{name}_tokens.json")
    place.write_text(f'{json.dumps(golden)[:-1]}, "texts": [\n{rows}\n]}}\n')


main()
