"""The bodies of OpenAI's requests that this gateway takes, and the main answers (for the OpenAPI document).

Strict: a wrong type or an unknown name is refused. Names of OpenAI that mean nothing here (IGNORED) are
taken and ignored, as OpenAI does; names that would change the answer and cannot be honoured are unknown.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_STOPS = 16
MAX_PROMPTS = 256
MAX_INPUTS = 2048
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "verbosity",
)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Name = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Ignored: nothing is padded here.")


class Sampling(Strict):
    """What completions and chat have in common; the second part is vLLM's, as `extra_body`."""

    model: Name
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: list[Text] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)

    user: str | None = Field(None, description="Ignored.")
    metadata: dict[str, str] | None = Field(None, description="Ignored.")
    store: bool | None = Field(None, description="Ignored: nothing is stored.")
    service_tier: str | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored: the prefix cache needs no key.")
    prompt_cache_retention: str | None = Field(None, description="Ignored.")

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream true")
        return self


Prompt = (
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)
    ]
)


class CompletionRequest(Sampling):
    prompt: Prompt
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="Default 16, as OpenAI's.")
    echo: bool | None = Field(None, description="The prompt before the answer; for text prompts.")
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, description="Only the value of n.")
    suffix: None = Field(None, description="Not to be had.")

    @model_validator(mode="after")
    def _what_goes_together(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(f"best_of: got {self.best_of}, allowed: the value of n ({self.n or 1})")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: not together with logprobs")
        if self.echo and not (isinstance(self.prompt, str) or isinstance(self.prompt[0], str)):
            raise ValueError("echo: only with prompts of text")
        return self


class ImageUrl(Strict):
    url: str
    detail: str | None = Field(None, description="Ignored.")


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class FunctionCall(Strict):
    name: Name
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart | ImagePart], Field(min_length=1)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = Field(None, description="Ignored.")
    annotations: list[Any] | None = Field(None, description="Ignored: what OpenAI's answers carry.")

    @model_validator(mode="after")
    def _has_something_to_say(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content: missing")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("tool_call_id: missing in a message of the role tool")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only in a message of the assistant")
        return self


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="Default: what the context has left.")
    max_completion_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="The newer name of max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    response_format: (
        Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    reasoning_effort: str | None = Field(
        None, description="`none` switches thinking off; else for the template."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = Field(None, description="Ignored.")
    verbosity: str | None = Field(None, description="Ignored.")

    @model_validator(mode="after")
    def _what_goes_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice: only with tools")
        grammar = self.response_format is not None and self.response_format.type != "text"
        if grammar and self.structured_outputs:
            raise ValueError("structured_outputs: not together with response_format")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError("max_completion_tokens: not the same as max_tokens; give one of them")
        return self


class EmbeddingRequest(Strict):
    model: Name
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_INPUTS)
        ]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=2**31)
    user: str | None = Field(None, description="Ignored.")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: UsageBody


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: UsageBody


class EmbeddingAnswer(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    model: str
    usage: dict[str, int]
