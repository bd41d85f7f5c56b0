"""Tools of Responses requests: functions, namespaces, the patch tool, client-side tool search.

{"type": "namespace", "name": "crm", "description": "CRM", "tools": [{"type": "function", "name": "find", ...}]}

V4.1  crm::find, described as "CRM\\n" + its own description
V4    crm__find, with its own description; no tool search. Where the two meet in an underscore anyway nothing is put
      between them: mcp__crm__ and find are mcp__crm__find
A full name that is taken gets a number: crm::find_1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from deepseek_recipe import protocol_data
from deepseek_recipe.checks import shown
from deepseek_recipe.enums import ModelVersion, WebSearchBehavior
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.requests import wire_responses as wire
from deepseek_recipe.requests.common import ToolSpec, check_tool_name, check_unique
from deepseek_recipe.requests.options import ConversionOptions

__all__ = ["TOOL_SEARCH_NAME", "ToolReader", "listed_tools"]

TOOL_SEARCH_NAME = "tool_search"
_MAX_REPEATED_CHARS = 2**25


class ToolReader:
    """Reads the tools of a request and gives namespaced ones their full names."""

    def __init__(self, version: ModelVersion, options: ConversionOptions, declared: Sequence[wire.Tool | None]) -> None:
        self.is_pro = version is ModelVersion.DeepseekV4Pro
        self._rejects_web_search = options.responses_web_search is WebSearchBehavior.Reject
        # Tools outside namespaces keep their names wherever they stand in the list.
        self._taken = {tool.name for tool in declared if isinstance(tool, (wire.FunctionTool, wire.CustomTool))}
        self._last_number: dict[str, int] = {}
        self._repeated_chars = 0
        self._names_by_local: dict[tuple[str, str], str] = {}
        self.locals_by_name: dict[str, tuple[str, str]] = {}

    def specs(self, tools: Sequence[wire.Tool | None], path: str, *, found: bool = False) -> list[ToolSpec]:
        """The callable tools of a list; `found` ones came out of a tool search and are deferred."""
        specs: list[ToolSpec] = []
        for index, tool in enumerate(tools):
            place = f"{path}[{index}]"
            if isinstance(tool, wire.FunctionTool):
                check_tool_name(tool.name, f"{place}.name")
                specs.append(
                    ToolSpec(tool.name, tool.description, tool.parameters, f"{place}.name", tool.strict, found)
                )
            elif isinstance(tool, wire.CustomTool):
                specs.append(self._patch_spec(tool, place, found))
            elif isinstance(tool, wire.NamespaceTool):
                specs.extend(self._namespace_specs(tool, place, found))
            elif isinstance(tool, wire.ToolSearchTool):
                if tool.execution == "client" and not self.is_pro:
                    specs.append(ToolSpec(TOOL_SEARCH_NAME, tool.description, tool.parameters, place, None, found))
            elif isinstance(tool, wire.WebSearchTool) and self._rejects_web_search:
                raise ConversionError(f"{place}: hosted web search is not supported")
        return specs

    def _namespace_specs(self, tool: wire.NamespaceTool, path: str, found: bool) -> list[ToolSpec]:
        check_tool_name(tool.name, f"{path}.name")
        check_unique(inner.name for inner in tool.tools)
        specs: list[ToolSpec] = []
        for index, inner in enumerate(tool.tools):
            place = f"{path}.tools[{index}]"
            if isinstance(inner, wire.CustomTool):
                raise ConversionError(f"{place}: the custom tool {shown(inner.name)} cannot stand inside a namespace")
            check_tool_name(inner.name, f"{place}.name")
            description = inner.description
            if tool.description and not self.is_pro:
                self._repeated_chars += len(tool.description)
                if self._repeated_chars > _MAX_REPEATED_CHARS:
                    raise ConversionError(
                        f"{path}.description: repeated for every tool of a namespace, descriptions take more than the "
                        f"limit of {_MAX_REPEATED_CHARS} characters"
                    )
                description = f"{tool.description}\n{description or ''}"
            name = self._full_name(tool.name, inner.name)
            specs.append(ToolSpec(name, description, inner.parameters, f"{place}.name", inner.strict, found))
        return specs

    def name_in_history(self, namespace: str, local: str) -> str:
        """The name under which the model sees that it called a tool of a namespace, known or not.

        To be asked for once all tools have been read: theirs come first.
        """
        known = self._names_by_local.get((namespace, local))
        return known or self._free_name(namespace, local)

    def _joined(self, namespace: str, local: str) -> str:
        if not self.is_pro:
            return f"{namespace}{protocol_data.NAMESPACE_MARK}{local}"
        meets_in_underscore = namespace.endswith("_") or local.startswith("_")
        return f"{namespace}{'' if meets_in_underscore else protocol_data.V4_NAMESPACE_MARK}{local}"

    def _full_name(self, namespace: str, local: str) -> str:
        full = self._free_name(namespace, local)
        self.locals_by_name[full] = (namespace, local)
        return full

    def _free_name(self, namespace: str, local: str) -> str:
        full = wanted = self._joined(namespace, local)
        number = self._last_number.get(wanted, 0)  # the numbers below are taken and stay so
        while full in self._taken:
            number += 1
            full = f"{wanted}_{number}"
        self._last_number[wanted] = number
        self._taken.add(full)
        self._names_by_local.setdefault((namespace, local), full)
        return full

    def _patch_spec(self, tool: wire.CustomTool, path: str, found: bool) -> ToolSpec:
        if tool.name != protocol_data.APPLY_PATCH_NAME:
            raise ConversionError(f"{path}.name: custom tool {shown(tool.name)} is not supported; only apply_patch is")
        v4, v41 = protocol_data.V4_APPLY_PATCH_DESCRIPTION, protocol_data.APPLY_PATCH_DESCRIPTION
        parameters = protocol_data.APPLY_PATCH_PARAMETERS
        return ToolSpec(tool.name, v4 if self.is_pro else v41, parameters, f"{path}.name", None, found)


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
