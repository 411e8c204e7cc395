"""A model's chat template: messages and tools in, the prompt's text out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from millrace.text.template_renderer import LocalRenderer, TemplateRenderer


class ChatTemplate:
    def __init__(
        self, source: str, renderer: TemplateRenderer | None = None, **constants: Any
    ) -> None:
        """`constants` are visible to the template: bos_token, eos_token and the like."""
        self.source = source
        self._renderer = renderer or LocalRenderer()
        self._constants = constants

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads from outside."""
        return self._renderer.variables(self.source)

    @functools.cached_property
    def _needs_tools(self) -> bool:
        asked = {"messages": [{"role": "user", "content": "?"}]}
        return self._renderer.needs_tools(self.source, self._constants | asked)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. What the template refuses is the request's fault."""
        if not tools:
            tools = [] if self._needs_tools else None
        values = self._constants | kwargs
        values["messages"] = list(messages)
        values["tools"] = None if tools is None else list(tools)
        values["add_generation_prompt"] = add_generation_prompt
        return self._renderer.render(self.source, values)
