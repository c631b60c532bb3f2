"""A reader for the XML that nvidia-smi really writes.

Some releases close elements that were never opened, none escapes `&` and `<` in the names of
processes, and a tool that was killed leaves half a page. A strict parser would lose every card over
any of these; this one takes what is there, never raises, and knows no entities or DTDs to be abused.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field

_TAG = re.compile(r"<(/?)([A-Za-z_][\w.-]{0,80})((?:[\s/][^<>]*)?)>")
_DEEPEST = 64
"""Real pages nest to eight levels. A bound keeps the work in proportion to the page, whatever it holds."""
_ATTRIBUTE = re.compile(r"""([\w.-]+)\s*=\s*["']+([^"'<>]*)["']+""")


@dataclass(slots=True)
class Element:
    """One element: its own text in parts, and its children in order."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    children: list[Element] = field(default_factory=list)

    def find(self, path: str) -> Element | None:
        """The first element at a path of names such as `pci/pci_bus_id`."""
        found: Element | None = self
        for name in path.split("/"):
            if found is None:
                return None
            found = next((child for child in found.children if child.name == name), None)
        return found

    def find_all(self, path: str) -> list[Element]:
        """Every element with the last name of the path, under the first parent that it names."""
        head, _, name = path.rpartition("/")
        parent = self.find(head) if head else self
        return [] if parent is None else [child for child in parent.children if child.name == name]

    def find_deep(self, name: str) -> list[Element]:
        """Every element of that name at any depth, in the order of the page."""
        found: list[Element] = []
        left = list(reversed(self.children))
        while left:
            element = left.pop()
            if element.name == name:
                found.append(element)
            left.extend(reversed(element.children))
        return found

    def value(self, path: str) -> str | None:
        """The text at a path; `None` where there is no such element."""
        found = self.find(path)
        return None if found is None else "".join(found.parts).strip()


def read_markup(text: str) -> Element:
    """Read a page into a root without a name. Never raises."""
    root = Element("")
    stack = [root]
    position = 0
    for tag in _TAG.finditer(text):
        stack[-1].parts.append(html.unescape(text[position : tag.start()]))
        position = tag.end()
        closing, name, rest = tag.groups()
        if closing:
            _close(stack, name)
            continue
        element = Element(name, {key: html.unescape(value) for key, value in _ATTRIBUTE.findall(rest)})
        stack[-1].children.append(element)
        if not rest.endswith("/") and len(stack) < _DEEPEST:
            stack.append(element)
    return root


def _close(stack: list[Element], name: str) -> None:
    """Close the innermost open element of that name; one that was never opened is passed over."""
    for depth in range(len(stack) - 1, 0, -1):
        if stack[depth].name == name:
            del stack[depth:]
            return
