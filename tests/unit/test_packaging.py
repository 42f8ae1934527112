"""The wheel: built, installed for real in an empty environment, and used from another directory."""

from __future__ import annotations

import ast
import csv
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("oscar_jax", "pallas_kernels", "calib")
COMMANDS = ("oscar_jax.serve", "oscar_jax.fetch", "oscar_jax.evaluate", "oscar_jax.bench", "calib")
# No path to this checkout: what runs is what was installed.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def run(*command: str | Path, cwd: Path) -> str:
    """The command's standard output; its standard error is in the failure's message."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stderr[-4000:]}"
    return done.stdout


def shipped_files() -> set[str]:
    """What the checkout has for the wheel: sources, model files and rotation checkpoints."""
    sources = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in ROOT.glob(f"{package}/**/*.py")
    }
    data = [*ROOT.glob("configs/*.yaml"), *ROOT.glob("configs/rotations/**/*")]
    tuning = {str(path.relative_to(ROOT)) for path in ROOT.glob("pallas_kernels/**/*.json")}
    model_files = {f"oscar_jax/{path.relative_to(ROOT)}" for path in data if path.is_file()}
    return sources | tuning | model_files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder of an earlier day leaks into it."""
    source = tmp_path_factory.mktemp("source")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel and what the wheel asks for.

    The distributions are links to those of this environment, all that the wheel's requirements
    lead to and no other: installing them anew takes a minute (``.ci/run`` does, with the newest
    jax), and what they compiled to is there already.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    run(*PIP, "--python", python, "install", "--no-deps", wheel, cwd=home)
    (site,) = home.glob("lib/python*/site-packages")
    (own,) = importlib.metadata.distributions(name="oscar-jax", path=[str(site)])
    asked_for = requirements(own)
    for place, owners in top_level().items():
        if owners & asked_for:
            assert owners <= asked_for, f"{place} belongs to {owners - asked_for} too"
            (site / place.name).symlink_to(place)
    run(*PIP, "--python", python, "check", cwd=home)
    return python


def requirements(wanted: importlib.metadata.Distribution) -> set[str]:
    """The names of all distributions that one needs here, extras that they ask for included."""
    found: set[str] = set()
    left = [(wanted, "")]
    while left:
        one, extra = left.pop()
        for line in one.requires or ():
            needed = Requirement(line)
            if needed.marker and not needed.marker.evaluate({"extra": extra}):
                continue
            for asked in ("", *needed.extras):
                key = f"{canonicalize_name(needed.name)}[{asked}]"
                if key not in found:
                    found.add(key)
                    left.append((importlib.metadata.distribution(needed.name), asked))
    return {key.partition("[")[0] for key in found}


def top_level() -> dict[Path, set[str]]:
    """What lies in site-packages, and the distributions whose files those are."""
    found: dict[Path, set[str]] = {}
    for one in importlib.metadata.distributions():
        record = csv.reader((one.read_text("RECORD") or "").splitlines())
        for name in {row[0].partition("/")[0] for row in record} - {"..", "__pycache__"}:
            place = Path(str(one.locate_file(name)))
            found.setdefault(place, set()).add(canonicalize_name(one.name))
    return found


def test_the_wheel_holds_every_source_and_data_file_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == shipped_files()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_asks_for_python_3_12_and_offers_the_four_extras(wheel: Path) -> None:
    path = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(path).decode()
    assert "Requires-Python: >=3.12" in text
    assert re.findall(r"^Provides-Extra: (.*)$", text, re.M) == ["cuda", "tpu", "report", "test"]


def test_the_commands_of_the_installed_wheel_explain_themselves(
    installed: Path, tmp_path: Path
) -> None:
    """As ``python -m`` runs them, in one process: importing jax takes longer than the help."""
    program = """
import contextlib, io, json, runpy, sys
told = {}
for command in sys.argv[1:]:
    sys.argv, printed = [command, "--help"], io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_module(command, run_name="__main__", alter_sys=True)
            status = None
        except SystemExit as end:
            status = end.code
    told[command] = (status, printed.getvalue())
print(json.dumps(told))
"""
    told = json.loads(run(installed, "-c", program, *COMMANDS, cwd=tmp_path))
    assert tuple(told) == COMMANDS
    for command, (status, text) in told.items():
        assert not status
        assert "usage" in text.lower()
        if command not in ("oscar_jax.fetch", "oscar_jax.bench"):  # a name; subcommands
            assert "--model" in text


def test_the_installed_wheel_reads_its_model_files_and_rotations(
    installed: Path, tmp_path: Path
) -> None:
    program = """
import json
from oscar_jax import checkpoint
from oscar_jax.config import model_entry, model_names
entry = model_entry("smollm2-135m")
rotation, metadata = checkpoint.load(entry.rotation, model_config=entry.architecture)
print(json.dumps([model_names(), str(entry.rotation), rotation.layers, metadata.recipe]))
"""
    names, path, layers, recipe = json.loads(run(installed, "-c", program, cwd=tmp_path))
    assert names == sorted(file.stem for file in ROOT.glob("configs/*.yaml"))
    assert Path(path).is_relative_to(installed.parents[1])
    assert (layers, recipe) == (30, "stretch+centre+waterfill+gain")


def test_the_installed_wheel_serves_a_short_generation(installed: Path, tmp_path: Path) -> None:
    """Through the real command; the weights are random, so that it compiles in seconds."""
    model = yaml.safe_load((ROOT / "configs" / "smollm2-135m.yaml").read_text())
    model["source"] = {"kind": "hub", "repo": "nobody/tiny"}
    model["architecture"] |= {"num_layers": 1, "hidden_size": 128, "intermediate_size": 128}
    model.pop("rotation", None)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(model))
    flags = (
        "--model tiny.yaml --load-format dummy --rotation hadamard --port 0 --max-model-len 600 "
        "--max-num-seqs 1 --prefill-chunk 128 --steps-per-dispatch 1 --served-model-name tiny"
    )
    with subprocess.Popen(
        [str(installed), "-m", "oscar_jax.serve", *flags.split()],
        cwd=tmp_path,
        env=ENVIRONMENT | {"OSCAR_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        assert server.stdout is not None
        printed = ""
        for line in server.stdout:
            printed += line
            if ready := re.search(r"ready: (http\S+)", line):
                break
        else:
            pytest.fail(f"the server ended before it was ready:\n{printed[-4000:]}")
        body = {"model": "tiny", "prompt": "one two", "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"{ready[1]}/v1/completions", json=body, timeout=60).json()
        server.terminate()
        server.stdout.read()
    assert answer["usage"]["completion_tokens"] == 5
    assert server.returncode == 0


def is_optional(node: ast.AST) -> bool:
    """A try statement that does without what it cannot import."""
    return isinstance(node, ast.Try) and any(
        isinstance(handler.type, ast.Name) and handler.type.id == "ImportError"
        for handler in node.handlers
    )


def third_party_imports() -> Iterator[tuple[str, str]]:
    """(where, top-level module) of each import that the packages need, lazy ones included."""
    for package in PACKAGES:
        for path in ROOT.glob(f"{package}/**/*.py"):
            tree = ast.parse(path.read_text())
            optional = {
                id(inner)
                for node in ast.walk(tree)
                if is_optional(node)
                for inner in ast.walk(node)
            }
            for node in ast.walk(tree):
                if id(node) in optional:
                    continue
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [node.module]
                else:
                    continue
                for name in names:
                    top = name.partition(".")[0]
                    if top not in sys.stdlib_module_names and top not in PACKAGES:
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", top


def test_every_import_belongs_to_a_declared_dependency() -> None:
    def plain(requirement: str) -> str:
        return re.split(r"[\s\[<>=!~;]", requirement)[0].lower().replace("_", "-")

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {plain(line) for line in project["dependencies"] + extras["report"]}
    declared.add("jaxlib")  # jax is its Python half and asks for the very same version
    providers = importlib.metadata.packages_distributions()
    missing = [
        f"{where} imports {top}"
        for where, top in third_party_imports()
        if not declared & {plain(name) for name in providers.get(top, [top])}
    ]
    assert missing == []


def test_every_dependency_is_pinned_for_ci_inside_the_declared_range() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "requirements" / "ci.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in project["dependencies"] + extras["report"] + extras["test"]:
        requirement = Requirement(line)
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{line}: no pin in requirements/ci.txt"
        assert requirement.specifier.contains(version), f"{line}: ci.txt pins {version}"
