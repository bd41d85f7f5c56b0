"""A conversation: the model thinks, answers, and calls a tool whose result it is given.

uv run examples/chat.py "What is 12 + 30?"

Messages, tools and response formats are those of Chat Completions. Calls and JSON are enforced by a grammar, so they
parse with every model, the small bundled one included, whose answers are no wiser than it is.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from deepinfer_core import LLM, SamplingParams

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 999},
                "b": {"type": "integer", "minimum": 0, "maximum": 999},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat, with thinking and with a tool.")
    parser.add_argument("question", nargs="?", default="What is 12 + 30?")
    parser.add_argument("--model", help="a checkpoint folder, a hub name, or tiny (the default on a CPU)")
    parser.add_argument("--max-tokens", type=int, default=160)
    args = parser.parse_args()
    params = SamplingParams(temperature=0.6, seed=1, max_tokens=args.max_tokens)
    messages: list[dict[str, Any]] = [{"role": "user", "content": args.question}]
    with LLM(args.model, quiet=True) as llm:
        answer = llm.chat(messages, params)
        print(f"thinking: {answer.reasoning}\nanswer:   {answer.content}  ({answer.finish_reason})\n")

        call = llm.chat(messages, params, thinking=False, tools=[ADD], tool_choice="required")
        messages.append(call.message)
        for one in call.tool_calls:
            arguments = json.loads(one["function"]["arguments"])
            result = arguments["a"] + arguments["b"]
            print(f"tool call: add({arguments['a']}, {arguments['b']}) = {result}")
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": str(result)})

        print("answer:    ", end="")
        for chunk in llm.chat_stream(messages, params, thinking=False, tools=[ADD], tool_choice="none"):
            for choice in chunk["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
