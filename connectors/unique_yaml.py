"""Reads YAML as what it says: a key that stands twice in one mapping is refused; YAML would take the last."""

from __future__ import annotations

from typing import Any

import yaml


class UniqueKeyLoader(yaml.SafeLoader):
    """A loader for `yaml.load`. It raises ConstructorError, a YAMLError, with the place of the second key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """One mapping."""
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands there twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
