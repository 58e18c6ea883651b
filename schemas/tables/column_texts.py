"""The texts of a row's columns: the docstrings below the fields of its class."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any


def column_texts(row_type: type[Any]) -> dict[str, str]:
    """Return the docstring of each field of a row class as one line, by the field's name.

    A field without a docstring is left out, as are the fields of base classes. The function reads the source of
    the class, so call it once per class.
    """
    (tree,) = ast.parse(inspect.getsource(row_type)).body
    found = {}
    for field, below in pairwise(ast.iter_child_nodes(tree)):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found
