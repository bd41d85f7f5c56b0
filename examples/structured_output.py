"""Answers that always have the form that was asked for: a JSON Schema, a regular expression, a choice, a grammar.

uv run examples/structured_output.py
"""

from __future__ import annotations

import argparse
import json

from deepinfer_core import LLM, SamplingParams, StructuredOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"enum": ["chess", "tennis", "books"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}

SUM = """
root   ::= number (" + " number){1,4}
number ::= [1-9] [0-9]{0,2}
"""

FORMS = {
    "Describe a person as JSON: ": StructuredOutput(json=PERSON),
    "The date of the first flight was ": StructuredOutput(regex=r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d)"),
    "Is the sea blue? ": StructuredOutput(choice=["yes", "no", "it depends"]),
    "A sum: ": StructuredOutput(grammar=SUM),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers in a given form.")
    parser.add_argument("--model", help="a checkpoint folder, a hub name, or tiny (the default on a CPU)")
    parser.add_argument("--seed", type=int, default=7, help="the same seed gives the same answers")
    args = parser.parse_args()
    params = [SamplingParams(max_tokens=128, seed=args.seed, structured=form) for form in FORMS.values()]
    with LLM(args.model, quiet=True) as llm:
        outputs = llm.generate(list(FORMS), params)
    for output in outputs:
        print(f"{output.prompt}{output.outputs[0].text}")
    person = json.loads(outputs[0].outputs[0].text)
    print(f"{person['name']} is {person['age']} and likes {' and '.join(person['hobbies'])}.")


if __name__ == "__main__":
    main()
