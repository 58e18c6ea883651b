"""Read YAML strictly: a key that is written twice in one mapping is refused. YAML would use the last one."""

from __future__ import annotations

from typing import Any

import yaml


class InvalidYaml(ValueError):
    """The text is not YAML, or has a construct that is not supported. The message says why, in one line."""


class UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that raises ComposerError for a key that one mapping has twice. The error has the line."""

    # Before the values are constructed: `<<` adds the keys of another mapping to those that are written.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the node of one mapping. PyYAML calls this. Raises ComposerError for a repeated key."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"the key {key.value!r} is written twice", key.start_mark
                )
            seen.add((key.tag, key.value))
        return node


class PlainLoader(UniqueKeyLoader):
    """A YAML loader that also refuses aliases (`*name`), which can make a short file expand to a huge one."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node. PyYAML calls this. Raises ConstructorError for an alias."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "an alias; write it out", event.start_mark)
        return super().compose_node(parent, index)


def load_yaml(content: bytes, loader: type[UniqueKeyLoader] = UniqueKeyLoader) -> Any:
    """Parse a YAML text in UTF-8 and return its value, as dicts, lists and scalars.

    Args:
        content: The text. Empty content gives None.
        loader: `UniqueKeyLoader` allows aliases, `PlainLoader` does not.

    Raises:
        InvalidYaml: The text is not UTF-8 or YAML, repeats a key, or has a construct that the loader refuses.
    """
    try:
        return yaml.load(content.decode("utf-8"), loader)  # noqa: S506  a safe one
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidYaml(" ".join(str(error).split())) from None
    except (RecursionError, ValueError, LookupError, TypeError, AttributeError) as error:
        # RecursionError: nested too deep. PyYAML raises the others for values that do not fit their tag.
        raise InvalidYaml(type(error).__name__) from None
