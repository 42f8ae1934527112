"""What clients may send: strict models of the two generation requests, and their limits.

A field that is not listed here is refused by name. So is a field of OpenAI's API that this server
does not implement, unless its value asks for nothing (``presence_penalty: 0``, ``tools: []``).
Every optional field may be null, which means its default.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from oscar_jax.engine.request import SamplingParams
from oscar_jax.server.errors import ApiError, invalid, shortened

MAX_CHOICES_PER_PROMPT = 8
MAX_PROMPTS = 64
MAX_CHOICES = 128  # prompts times n
MAX_MESSAGES = 1024
MAX_PARTS = 256
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 8  # the engine has room for 16, the model's own included
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of the completions endpoint

# Fields of OpenAI's and vLLM's API that are not implemented, with the values that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "echo": (None, False),
    "frequency_penalty": (None, 0, 0.0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None,),
    "prediction": (None,),
    "presence_penalty": (None, 0, 0.0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1, 1.0),
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "use_beam_search": (None, False),
}


class Strict(BaseModel):
    """No unknown fields, no coercion of types, no NaN and no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """``include_usage``: one more event before [DONE], with the token counts of the request."""

    include_usage: bool | None = None


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class Generation(Strict):
    """The fields that both generation requests share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_PROMPT)] | None = None
    stop: (
        Annotated[list[StopText], Field(max_length=MAX_STOPS), BeforeValidator(_stop_list)] | None
    ) = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_STOP_TOKENS)]
        | None
    ) = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, StringConstraints(max_length=256)] | None = None

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise _fault("stream_options", "may only be given when stream is true")
        return self

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, max_tokens: int) -> list[SamplingParams]:
        """The settings of the n choices of one prompt, which differ in the seed alone.

        A seed of 64 bits is folded to the engine's 32 (0 to 2^32 - 1 stay what they are); choice i
        adds i times an odd constant, so choice 0 equals the same request with n = 1. Without a
        seed every choice gets a fresh one.
        """
        if self.seed is None:
            seeds = [secrets.randbits(32) for _ in range(self.choices_per_prompt)]
        else:
            folded = self.seed ^ (self.seed >> 32)
            seeds = [(folded + 0x9E3779B9 * i) % 2**32 for i in range(self.choices_per_prompt)]
        return [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=_given(self.temperature, 1.0),
                top_p=_given(self.top_p, 1.0),
                top_k=max(_given(self.top_k, 0), 0),  # vLLM's "off" is -1
                min_p=_given(self.min_p, 0.0),
                seed=seed,
                stop=tuple(self.stop or ()),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                include_stop_str_in_output=bool(self.include_stop_str_in_output),
                ignore_eos=bool(self.ignore_eos),
                min_tokens=min(self.min_tokens or 0, max_tokens),
            )
            for seed in seeds
        ]


def _given[Value](value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _fault(field: str, message: str) -> PydanticCustomError:
    """An error in our own words."""
    return PydanticCustomError("fault", "{message}", {"message": message, "field": field})


def _prompt_list(value: Any) -> Any:
    """OpenAI's four kinds of prompt as a list of strings or of token lists."""
    if isinstance(value, str):
        return [value]
    kinds = "must be a string, a list of strings, a token list or a list of token lists"
    if not isinstance(value, list):
        raise _fault("prompt", kinds)
    if not value:
        raise _fault("prompt", "must not be empty")
    if all(type(token) is int for token in value):  # JSON's true is no integer, Python's is
        return [value]
    if len(value) > MAX_PROMPTS:
        raise _fault("prompt", f"holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    if all(isinstance(prompt, str) for prompt in value):
        return value
    if all(
        isinstance(prompt, list) and all(type(token) is int for token in prompt) for prompt in value
    ):
        return value
    raise _fault("prompt", kinds)


class CompletionRequest(Generation):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[list[Any], BeforeValidator(_prompt_list)]

    @model_validator(mode="after")
    def _not_too_many_choices(self) -> CompletionRequest:
        choices = len(self.prompt) * self.choices_per_prompt
        if choices > MAX_CHOICES:
            raise _fault("n", f"times the prompts gives {choices} choices; at most {MAX_CHOICES}")
        return self


class TextPart(Strict):
    """A part of a message: text is the only kind there is."""

    type: Literal["text"]
    text: str


def _part_list(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return value


class Message(Strict):
    """One message of a conversation; its text parts are joined by newlines."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], Field(max_length=MAX_PARTS), BeforeValidator(_part_list)]
    name: Annotated[str, StringConstraints(max_length=256)] | None = None

    def rendered(self) -> dict[str, str]:
        """What the chat template gets; "developer" is today's name of "system"."""
        role = "system" if self.role == "developer" else self.role
        content = "\n".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": content, **named}


class TemplateOptions(Strict):
    """The only variables of the chat template that a client may set."""

    enable_thinking: bool | None = None


class ChatRequest(Generation):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def _one_maximum(self) -> ChatRequest:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise _fault("max_completion_tokens", "contradicts max_tokens; give one of them")
        return self

    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template that the request sets."""
        options = self.chat_template_kwargs
        return {} if options is None else options.model_dump(exclude_none=True)


def parse[Body: Generation](body: bytes, model: type[Body]) -> Body:
    """A request body as a checked model.

    Raises:
        ApiError: 400 that names the first field at fault and what it may be.
    """
    try:
        fields = pydantic_core.from_json(body)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    for name in [name for name in fields if name in NOT_SUPPORTED]:
        value = fields.pop(name)
        if not any(type(value) is type(none) and value == none for none in NOT_SUPPORTED[name]):
            raise _unsupported(name)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _first_fault(error, model) from None


def _unsupported(name: str) -> ApiError:
    neutral = ", ".join(pydantic_core.to_json(none).decode() for none in NOT_SUPPORTED[name])
    return invalid(
        f"{name} is not supported by this server; leave it out (or send {neutral}).",
        param=name,
        code="unsupported_parameter",
    )


def _first_fault(error: ValidationError, model: type[Generation]) -> ApiError:
    fault = error.errors(include_url=False, include_input=False)[0]
    context = fault.get("ctx", {})
    path = [str(context["field"])] if "field" in context else _path(fault["loc"])
    param = path[0] if path else None
    if fault["type"] == "extra_forbidden":
        known = ", ".join(sorted(model.model_fields))
        where = f" (fields of the request: {known})" if len(path) == 1 else ""
        name = shortened(".".join(path))
        return invalid(f"Unknown field {name}{where}.", param=shortened(path[0]).strip("'"))
    return invalid(f"{'.'.join(path)}: {fault['msg']}", param=param)


def _path(location: tuple[int | str, ...]) -> list[str]:
    """Field names and indices; without the names of a union's branches, which mean nothing."""
    return [str(step) for step in location if isinstance(step, int) or step.isidentifier()]
