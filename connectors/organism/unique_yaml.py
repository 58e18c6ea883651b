"""Reads YAML as what it says: a key written twice in one mapping is refused; YAML would take the last."""

from __future__ import annotations

from typing import Any

import yaml


class UniqueKeyLoader(yaml.SafeLoader):
    """A loader for `yaml.load`. It raises ComposerError, a YAMLError, with the place of the second key."""

    # Before anything is constructed: `<<` puts another mapping's keys next to those that stand there.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """One mapping."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"the key {key.value!r} stands there twice", key.start_mark
                )
            seen.add((key.tag, key.value))
        return node
