"""Edits C code that Cython has generated, to make it faster; what it does stays the same.

Attributes and method calls get inline caches, as in CPython's own interpreter: attribute_cache.h
holds them and says when they apply. Its text becomes part of each C file, so that the file compiles
on its own. The compiler is also told which code only handles exceptions, to place it elsewhere than
the code of the usual case.
"""

from __future__ import annotations

import re
from pathlib import Path

HEADER = Path(__file__).with_name("attribute_cache.h")
# Where the text of the header goes: all that it uses has been declared there.
_PLACE = "/* #### Code section: module_code ### */\n"
# A site caches one name, so only those with a constant name qualify.
_NAME = r"__pyx_mstate_global->__pyx_n_u_"
_SITES = (
    (rf"__Pyx_PyObject_GetAttrStr\(([^\n]{{1,200}}?), ({_NAME}\w+)\)", r"GET_ATTRIBUTE(\1, \2)"),
    (rf"__Pyx_PyObject_SetAttrStr\(([^\n]{{1,200}}?), {_NAME}", rf"SET_ATTRIBUTE(\1, {_NAME}"),
    (rf"__Pyx_PyObject_FastCallMethod\(\(PyObject\*\){_NAME}", rf"CALL_METHOD((PyObject*){_NAME}"),
)
# Every function calls this one when an exception leaves it.
_ON_EXCEPTION = "static void __Pyx_AddTraceback("


def improve(code: str) -> str:
    """Add inline caches to the text of a C file, and mark its error branches as unlikely.

    Returns the new text.

    Raises ValueError if the text is not in the form that Cython generates.
    """
    if code.count(_PLACE) != 1 or _ON_EXCEPTION not in code:
        raise ValueError("the C code lacks a section or a function that Cython generates")
    for cython_call, cached in _SITES:
        code = re.sub(cython_call, f"PENSTOCK_{cached}", code)
    code = code.replace(_ON_EXCEPTION, f"__attribute__((cold)) {_ON_EXCEPTION}", 1)
    return code.replace(_PLACE, f"{_PLACE}\n{HEADER.read_text()}\n")
