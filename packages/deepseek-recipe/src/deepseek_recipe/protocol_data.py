"""Protocol data: the byte-exact strings that DeepSeek V4 and V4.1 were trained on.

Provenance: observed in the prompts of the MIT-licensed protocol codec `deepseek-recipe` 0.2.0, whose outputs are the
test vectors of this package (`tests/fixtures/recipe`). They are data, not prose of this project: a changed byte is a
different prompt for the model, so nothing here may be reworded, and a test compares every string with the fixture.

In `TOOLS_BLOCK_BEFORE` the words in braces stand for special tokens and for the tag names of `DSML_TAGS`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

SPECIAL_TOKEN_SPELLINGS: Final[dict[str, str]] = {
    "Bos": "<｜begin▁of▁sentence｜>",
    "Eos": "<｜end▁of▁sentence｜>",
    "ThinkingStart": "<think>",
    "ThinkingEnd": "</think>",
    "System": "<｜System｜>",
    "User": "<｜User｜>",
    "Assistant": "<｜Assistant｜>",
    "LatestReminder": "<｜latest_reminder｜>",
    "Dsml": "｜DSML｜",
    "Image": "<｜image｜>",
    "Ref": "<｜ref｜>",
    "RefEnd": "<｜/ref｜>",
    "Box": "<｜box｜>",
    "BoxEnd": "<｜/box｜>",
    "Point": "<｜point｜>",
    "PointEnd": "<｜/point｜>",
    "Polygon": "<｜polygon｜>",
    "PolygonEnd": "<｜/polygon｜>",
}

IMAGE_SPECIAL_TOKEN_ID: Final = 129264

# Fill in the middle: added tokens of the V3 and V4 tokenizers, in the order that DeepSeek-Coder documents.
FIM_BEGIN: Final = "<｜fim▁begin｜>"
FIM_HOLE: Final = "<｜fim▁hole｜>"
FIM_END: Final = "<｜fim▁end｜>"


class DsmlTags(NamedTuple):
    """Tag names of a tool-call block, written directly after the DSML marker."""

    block: str
    invoke: str
    parameter: str


V4_DSML_TAGS: Final = DsmlTags("tool_calls", "invoke", "parameter")
V41_DSML_TAGS: Final = DsmlTags(" calls", " invoke", " parameter")

V4_PREAMBLE_LOW: Final = ""
V4_PREAMBLE_HIGH: Final = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the "
    "root cause, rigorously stress-testing your logic against all potential paths, edge cases, and "
    "adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n"
    "\n"
)
V4_PREAMBLE_MAX: Final = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively "
    "decompose the problem into its most fundamental components, trace every causal chain to its root, "
    "and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and "
    "are certain that no assumption remains unchecked and no error remains undiscovered.\n"
    "\n"
)
V41_PREAMBLE_LOW: Final = (
    "Reasoning Effort: 50 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
V41_PREAMBLE_HIGH: Final = (
    "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
V41_PREAMBLE_MAX: Final = (
    "Reasoning Effort: 100 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)

TOOLS_BLOCK_BEFORE: Final = (
    "\n"
    "\n"
    "## Tools\n"
    "\n"
    "You have access to a set of tools to help answer the user's question. You can invoke tools by "
    'writing a "<{dsml}{block}>" block like the following:\n'
    "\n"
    "<{dsml}{block}>\n"
    '<{dsml}{invoke} name="$TOOL_NAME">\n'
    '<{dsml}{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{dsml}{parameter}>\n'
    "...\n"
    "</{dsml}{invoke}>\n"
    '<{dsml}{invoke} name="$TOOL_NAME2">\n'
    "...\n"
    "</{dsml}{invoke}>\n"
    "</{dsml}{block}>\n"
    "\n"
    'String parameters should be specified as is and set `string="true"`. For all other types (numbers, '
    'booleans, arrays, objects), pass the value in JSON format and set `string="false"`.\n'
    "\n"
    "If thinking_mode is enabled (triggered by {think}), you MUST output your complete reasoning inside "
    "{think}...{think_end} BEFORE any tool calls or final response.\n"
    "\n"
    "Otherwise, output directly after {think_end} with tool calls or final response.\n"
    "\n"
    "### Available Tool Schemas\n"
    "\n"
)
TOOLS_BLOCK_AFTER: Final = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)
UPDATED_TOOLS_PREFIX: Final = "\n\n### Updated Tool Schemas\n\n"

V4_JSON_OBJECT_BLOCK: Final = (
    "\n\nYou are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY."
)
V41_JSON_OBJECT_BLOCK: Final = (
    '\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"type": "json_object"}'
)
JSON_SCHEMA_PREFIX: Final = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

TOOL_RESULT_OPEN: Final = "<tool_result>"
TOOL_RESULT_CLOSE: Final = "</tool_result>"

IMAGE_UNSUPPORTED_PLACEHOLDER: Final = "[Unsupported Image]"
INPUT_FILE_PLACEHOLDER: Final = "[Unsupported Document]"
DOCUMENT_PLACEHOLDER: Final = "[Unsupported document type: {media_type}]"

SYSTEM_REMINDER: Final = "<system-reminder>\n{text}\n</system-reminder>"
"""How V4 shows a system message in the middle of a Messages conversation: as a user message."""

NAMESPACE_MARK: Final = "::"
V4_NAMESPACE_MARK: Final = "__"

APPLY_PATCH_NAME: Final = "apply_patch"
APPLY_PATCH_DESCRIPTION: Final = (
    "Use the `apply_patch` tool to edit files.\n"
    "Your patch language is a stripped‑down, file‑oriented diff format designed to be easy to parse and "
    "safe to apply. You can think of it as a high‑level envelope:\n"
    "\n"
    "*** Begin Patch\n"
    "[ one or more file sections ]\n"
    "*** End Patch\n"
    "\n"
    "Within that envelope, you get a sequence of file operations.\n"
    "You MUST include a header to specify the action you are taking.\n"
    "Each operation starts with one of three headers:\n"
    "\n"
    "*** Add File: <path> - create a new file. Every following line is a + line (the initial contents).\n"
    "*** Delete File: <path> - remove an existing file. Nothing follows.\n"
    "*** Update File: <path> - patch an existing file in place (optionally with a rename).\n"
    "\n"
    "May be immediately followed by *** Move to: <new path> if you want to rename the file.\n"
    "Then one or more “hunks”, each introduced by @@ (optionally followed by a hunk header).\n"
    "Within a hunk each line starts with:\n"
    "\n"
    "For instructions on [context_before] and [context_after]:\n"
    "- By default, show 3 lines of code immediately above and 3 lines immediately below each change. If "
    "a change is within 3 lines of a previous change, do NOT duplicate the first change’s "
    "[context_after] lines in the second change’s [context_before] lines.\n"
    "- If 3 lines of context is insufficient to uniquely identify the snippet of code within the file, "
    "use the @@ operator to indicate the class or function to which the snippet belongs. For instance, "
    "we might have:\n"
    "@@ class BaseClass\n"
    "[3 lines of pre-context]\n"
    "- [old_code]\n"
    "+ [new_code]\n"
    "[3 lines of post-context]\n"
    "\n"
    "- If a code block is repeated so many times in a class or function such that even a single `@@` "
    "statement and 3 lines of context cannot uniquely identify the snippet of code, you can use multiple "
    "`@@` statements to jump to the right context. For instance:\n"
    "\n"
    "@@ class BaseClass\n"
    "@@ \t def method():\n"
    "[3 lines of pre-context]\n"
    "- [old_code]\n"
    "+ [new_code]\n"
    "[3 lines of post-context]\n"
    "\n"
    "The full grammar definition is below:\n"
    "Patch := Begin { FileOp } End\n"
    'Begin := "*** Begin Patch" NEWLINE\n'
    'End := "*** End Patch" NEWLINE\n'
    "FileOp := AddFile | DeleteFile | UpdateFile\n"
    'AddFile := "*** Add File: " path NEWLINE { "+" line NEWLINE }\n'
    'DeleteFile := "*** Delete File: " path NEWLINE\n'
    'UpdateFile := "*** Update File: " path NEWLINE [ MoveTo ] { Hunk }\n'
    'MoveTo := "*** Move to: " newPath NEWLINE\n'
    'Hunk := "@@" [ header ] NEWLINE { HunkLine } [ "*** End of File" NEWLINE ]\n'
    'HunkLine := (" " | "-" | "+") text NEWLINE\n'
    "\n"
    "A full patch can combine several operations:\n"
    "\n"
    "*** Begin Patch\n"
    "*** Add File: hello.txt\n"
    "+Hello world\n"
    "*** Update File: src/app.py\n"
    "*** Move to: src/main.py\n"
    "@@ def greet():\n"
    '-print("Hi")\n'
    '+print("Hello, world!")\n'
    "*** Delete File: obsolete.txt\n"
    "*** End Patch\n"
    "\n"
    "It is important to remember:\n"
    "\n"
    "- You must include a header with your intended action (Add/Delete/Update)\n"
    "- You must prefix new lines with `+` even when creating a new file\n"
    "- File references can only be relative, NEVER ABSOLUTE.\n"
)
V4_APPLY_PATCH_DESCRIPTION: Final = APPLY_PATCH_DESCRIPTION.replace(
    "envelope:\n\n*** Begin Patch", "envelope:\n*** Begin Patch", 1
)
APPLY_PATCH_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "input": {
            "type": "string",
            "description": (
                "The entire contents of the apply_patch command (the *** Begin Patch ... *** End Patch envelope)."
            ),
        }
    },
    "required": ["input"],
}
