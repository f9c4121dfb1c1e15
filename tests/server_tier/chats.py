"""What an unmodified `openai` client asks, by name; each returns what must be the same from any two servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openai import OpenAI

LONG_TEXT = "The river runs through the old city and past the mill. " * 40
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99999999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

Case = Callable[[OpenAI, str], Any]


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def streaming(client: OpenAI, model: str) -> Any:
    """The pieces of a streamed chat, and its usage."""
    stream = client.chat.completions.create(
        model=model,
        messages=user("What is the capital of France?"),
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usage = chunks[-1].usage
    assert usage is not None
    return text, usage.prompt_tokens, usage.completion_tokens


def named_tool(client: OpenAI, model: str) -> Any:
    """A tool the client insists on."""
    answer = client.chat.completions.create(
        model=model,
        messages=user("How is the weather in Paris?"),
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=48,
        temperature=0,
    )
    choice = answer.choices[0]
    calls = [call.function for call in choice.message.tool_calls or () if call.type == "function"]
    return [(call.name, call.arguments) for call in calls], choice.finish_reason


def automatic_tool(client: OpenAI, model: str) -> Any:
    """A tool the model may use."""
    answer = client.chat.completions.create(
        model=model,
        messages=user("How is the weather in Paris?"),
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice="auto",
        max_tokens=24,
        temperature=0,
    )
    message = answer.choices[0].message
    return message.content, [c.function.arguments for c in message.tool_calls or () if c.type == "function"]


def two_samples(client: OpenAI, model: str) -> Any:
    """n=2 with a seed."""
    answer = client.chat.completions.create(
        model=model, messages=user("Name a colour."), n=2, seed=7, temperature=0.8, max_tokens=12
    )
    return sorted((choice.index, choice.message.content) for choice in answer.choices)


def seeded(client: OpenAI, model: str) -> Any:
    """Sampling with a seed."""
    answer = client.completions.create(
        model=model, prompt="Once upon a time there was", seed=11, temperature=1.0, top_p=0.9, max_tokens=24
    )
    return answer.choices[0].text


def stop_strings(client: OpenAI, model: str) -> Any:
    """An answer cut off by a stop string."""
    answer = client.completions.create(
        model=model, prompt="One, two, three, four, five,", stop=[" eight", "\n\n"], temperature=0, max_tokens=32
    )
    return answer.choices[0].text, answer.choices[0].finish_reason


def with_logprobs(client: OpenAI, model: str) -> Any:
    """Tokens that a chat with logprobs lists."""
    answer = client.chat.completions.create(
        model=model,
        messages=user("Is water wet? Answer in one word."),
        logprobs=True,
        top_logprobs=3,
        max_tokens=6,
        temperature=0,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return [token.token for token in logprobs.content]


def json_schema(client: OpenAI, model: str) -> Any:
    """An answer that must fit a JSON schema."""
    answer = client.chat.completions.create(
        model=model,
        messages=user("Give a city and its number of people as JSON."),
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": SCHEMA, "strict": True},
        },
        max_tokens=64,
        temperature=0,
    )
    return answer.choices[0].message.content


def min_tokens_and_penalties(client: OpenAI, model: str) -> Any:
    """Parameters that must not reach the prefiller."""
    answer = client.completions.create(
        model=model,
        prompt=LONG_TEXT,
        max_tokens=16,
        temperature=0,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"198": -100},
        extra_body={"min_tokens": 12, "repetition_penalty": 1.1},
    )
    return answer.choices[0].text


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        streaming,
        named_tool,
        automatic_tool,
        two_samples,
        seeded,
        stop_strings,
        with_logprobs,
        json_schema,
        min_tokens_and_penalties,
    )
}


def client_of(url: str) -> OpenAI:
    """A client that never retries, so that every failure is seen."""
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def model_of(client: OpenAI) -> str:
    """The one model a server offers."""
    return client.models.list().data[0].id
