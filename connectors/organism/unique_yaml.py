"""Read YAML strictly: a key that is written twice in one mapping is refused. YAML would use the last one."""

from __future__ import annotations

from typing import Any

import yaml


class InvalidYaml(ValueError):
    """The text is not YAML, or has a construct that is not supported. The message says why, in one line."""


class UniqueKeyLoader(yaml.SafeLoader):
    """A loader that raises ComposerError, a YAMLError, with the place of a second key."""

    # Before the values are constructed: `<<` adds the keys of another mapping to those that are written.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return one mapping."""
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
    """A loader that also refuses aliases, with which a short file can expand to a very large one."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return one node."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "an alias; write it out", event.start_mark)
        return super().compose_node(parent, index)


def load_yaml(content: bytes, loader: type[UniqueKeyLoader] = UniqueKeyLoader) -> Any:
    """Return the value of a YAML text in UTF-8. Raises InvalidYaml."""
    try:
        return yaml.load(content.decode("utf-8"), loader)  # noqa: S506  a safe one
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidYaml(" ".join(str(error).split())) from None
    except (RecursionError, ValueError, LookupError, TypeError, AttributeError) as error:
        # RecursionError: nested too deep. PyYAML raises the others for values that do not fit their tag.
        raise InvalidYaml(type(error).__name__) from None
