"""Tools of Responses requests: functions, namespaces, the patch tool, client-side tool search.

{"type": "namespace", "name": "crm", "description": "CRM", "tools": [{"type": "function", "name": "find", ...}]}
  -> crm::find, described as "CRM\\n" + its own description; a second one of the name is crm::find_1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from deepseek_recipe import protocol_data
from deepseek_recipe.enums import WebSearchBehavior
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.requests import wire_responses as wire
from deepseek_recipe.requests.common import ToolSpec, check_tool_name, check_unique
from deepseek_recipe.requests.options import ConversionOptions

__all__ = ["ToolNames", "listed_tools", "namespace_map", "tool_specs"]

NAMESPACE_MARK = "::"
TOOL_SEARCH_NAME = "tool_search"


class ToolNames:
    """The names that a request has given to tools so far."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self.locals_by_name: dict[str, tuple[str, str]] = {}

    def plain(self, name: str) -> str:
        """Takes the name of a tool outside namespaces, which must be free."""
        if name in self._taken:
            raise ConversionError(f"tools: two tools are named {name!r}; names must be unique")
        self._taken.add(name)
        return name

    def namespaced(self, namespace: str, local: str) -> str:
        """Takes the full name of a tool in a namespace, with a number where it is taken."""
        full = wanted = f"{namespace}{NAMESPACE_MARK}{local}"
        number = 0
        while full in self._taken:
            number += 1
            full = f"{wanted}_{number}"
        self._taken.add(full)
        self.locals_by_name[full] = (namespace, local)
        return full


def tool_specs(
    tools: Sequence[wire.Tool | None], path: str, names: ToolNames, options: ConversionOptions, *, found: bool = False
) -> list[ToolSpec]:
    """The callable tools of a list; `found` ones came out of a tool search and are deferred."""
    specs: list[ToolSpec] = []
    for index, tool in enumerate(tools):
        place = f"{path}[{index}]"
        if isinstance(tool, wire.FunctionTool):
            check_tool_name(tool.name, f"{place}.name")
            name = names.plain(tool.name)
            specs.append(ToolSpec(name, tool.description, tool.parameters, f"{place}.name", tool.strict, found))
        elif isinstance(tool, wire.CustomTool):
            specs.append(_patch_spec(tool, place, names, found))
        elif isinstance(tool, wire.NamespaceTool):
            specs.extend(_namespace_specs(tool, place, names, found))
        elif isinstance(tool, wire.ToolSearchTool) and tool.execution == "client":
            name = names.plain(TOOL_SEARCH_NAME)
            specs.append(ToolSpec(name, tool.description, tool.parameters, place, None, found))
        elif isinstance(tool, wire.WebSearchTool) and options.responses_web_search is WebSearchBehavior.Reject:
            raise ConversionError(f"{place}: hosted web search is not supported")
    return specs


def namespace_map(tools: Sequence[wire.Tool | None]) -> dict[str, tuple[str, str]]:
    """Full name → (namespace, local name)."""
    names = ToolNames()
    tool_specs(tools, "tools", names, ConversionOptions())
    return names.locals_by_name


def listed_tools(tools: Sequence[wire.Tool | None], path: str) -> list[dict[str, Any]]:
    """The tools of a search as the model reads them: the functions of a namespace one by one."""
    listed: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        if tool is None:
            raise ConversionError(f"{path}[{index}]: a tool of this type cannot be the result of a tool search")
        if isinstance(tool, wire.NamespaceTool):
            namespace = {"name": tool.name, "description": tool.description or ""}
            listed.extend({**msgspec.to_builtins(inner), "namespace": namespace} for inner in tool.tools)
        else:
            listed.append(msgspec.to_builtins(tool))
    return listed


def _namespace_specs(tool: wire.NamespaceTool, path: str, names: ToolNames, found: bool) -> list[ToolSpec]:
    check_tool_name(tool.name, f"{path}.name")
    check_unique(inner.name for inner in tool.tools)
    specs: list[ToolSpec] = []
    for index, inner in enumerate(tool.tools):
        place = f"{path}.tools[{index}]"
        if isinstance(inner, wire.CustomTool):
            raise ConversionError(f"{place}: the custom tool {inner.name!r} cannot stand inside a namespace")
        check_tool_name(inner.name, f"{place}.name")
        name = names.namespaced(tool.name, inner.name)
        description = f"{tool.description}\n{inner.description or ''}" if tool.description else inner.description
        specs.append(ToolSpec(name, description, inner.parameters, f"{place}.name", inner.strict, found))
    return specs


def _patch_spec(tool: wire.CustomTool, path: str, names: ToolNames, found: bool) -> ToolSpec:
    if tool.name != protocol_data.APPLY_PATCH_NAME:
        raise ConversionError(f"{path}.name: the custom tool {tool.name!r} is not supported; only apply_patch is")
    description, parameters = protocol_data.APPLY_PATCH_DESCRIPTION, protocol_data.APPLY_PATCH_PARAMETERS
    return ToolSpec(names.plain(tool.name), description, parameters, f"{path}.name", None, found)
