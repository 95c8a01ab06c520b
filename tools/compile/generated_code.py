"""Makes the C code that Cython generates faster and smaller, without a change of its behaviour.

There are six changes:

- Access to attributes and calls of methods get inline caches, as in CPython's own interpreter.
  attribute_cache.h implements the caches. Its text is copied into each C file.
- Methods of C classes no longer check whether `self` is None. Instead, a method that Python code
  calls checks once that `self` is an object of its class: `Class.method(None)` raises a TypeError.
  When C code calls a method, it has already checked the object, so `self` cannot be None either.
  Checks in coroutines and closures stay: the garbage collector may replace their `self` by None.
- All other checks for None raise their error by one function, so that each passes one argument.
- The function that records a traceback is marked as cold, so that the C compiler moves the code
  for errors away from the usual path.
- Code that runs once, when a module starts, and code behind an error releases objects by a call.
  Elsewhere the C compiler inlines the release, which makes the code larger and faster.
- C classes of other modules are imported only where the code uses them. Cython imports each class
  that it has read a declaration of: 109 in a module that uses 7.
"""

from __future__ import annotations

import re
from pathlib import Path

HEADER = Path(__file__).with_name("attribute_cache.h")
# Marks the place for the header's text in the generated C file. All names that the header uses are
# declared above it.
_PLACE = "/* #### Code section: module_code ### */\n"
# Each call site caches one name, so only call sites with a constant name qualify.
_NAME = r"__pyx_mstate_global->__pyx_n_u_"
_SITES = (
    (rf"__Pyx_PyObject_GetAttrStr\(([^\n]{{1,200}}?), ({_NAME}\w+)\)", r"GET_ATTRIBUTE(\1, \2)"),
    (rf"__Pyx_PyObject_SetAttrStr\(([^\n]{{1,200}}?), {_NAME}", rf"SET_ATTRIBUTE(\1, {_NAME}"),
    (rf"__Pyx_PyObject_FastCallMethod\(\(PyObject\*\){_NAME}", rf"CALL_METHOD((PyObject*){_NAME}"),
)
_SELF_IS_NONE = re.compile(
    r" *if \(unlikely\(\(\(PyObject \*\)__pyx_v_self\) == Py_None\)\) \{[^{}]*\}\n"
)
# The C function that Python code calls for a method of a C class.
_WRAPPER = re.compile(
    r"^static PyObject \*__pyx_pw_\w+\(PyObject \*__pyx_v_self,[^;{}]*__pyx_args[^;{}]*\) \{\n"
    r".*?^\}\n",
    re.MULTILINE | re.DOTALL,
)
_END_OF_DECLARATIONS = re.compile(r"^ *__Pyx_RefNannySetupContext\(.*\n", re.MULTILINE)
_STRUCT_OF_SELF = re.compile(r"\(\(struct __pyx_obj_(\w+) \*\)__pyx_v_self\)")
_NONE_HAS_NO = re.compile(
    r"PyErr_Format\(PyExc_AttributeError, "
    r'"\\047NoneType\\047 object has no attribute \\047%(?:\.30)?s\\047", ("\w+")\);'
)
# The function that runs when a module starts.
_START = re.compile(
    r"^static CYTHON_SMALL_CODE int __pyx_pymod_exec_\w+\(PyObject \*\w+\)\n.*?^\}\n",
    re.MULTILINE | re.DOTALL,
)
_AFTER_ERROR = re.compile(
    r"^ *__pyx_L\d+_error:;\n(?: *__Pyx_XDECREF\(\w+\);(?: \w+ = 0;)?\n)+", re.MULTILINE
)
_RELEASE = re.compile(r"__Pyx_X?DECREF\(")
_TYPE_IMPORTS = re.compile(
    r"^static int __Pyx_modinit_Type_import_code\(__pyx_mstatetype \*__pyx_mstate\) \{\n"
    r".*?^\}\n",
    re.MULTILINE | re.DOTALL,
)
_MODULE_OF_TYPES = re.compile(
    r"^  __pyx_t_1 = PyImport_ImportModule\(.*\n  __Pyx_GOTREF\(__pyx_t_1\);\n"
    r"((?:.*\n)*?)  __Pyx_DECREF\(__pyx_t_1\); __pyx_t_1 = 0;\n",
    re.MULTILINE,
)
_TYPE_IMPORT = re.compile(
    r"^  __pyx_mstate->(__pyx_ptype_\w+) = __Pyx_ImportType_\w+\(__pyx_t_1, .*\n"
    r"(?:  #.*\n|  sizeof\(.*\n)*"
    r"  __Pyx_ImportType_CheckSize_\w+\); if .*\n"
    r"(?:  if \(unlikely\(__Pyx_GetVtable\(.*?, \(void\*\*\)&(__pyx_vtabptr_\w+)\) .*\n)?",
    re.MULTILINE,
)
# Declarations of the variables that _TYPE_IMPORT sets, and what Cython does with each of them.
_DECLARES_TYPE = re.compile(
    r"^ *(?:PyTypeObject \*__pyx_ptype_\w+;"
    r"|static struct \w+ \*__pyx_vtabptr_\w+(?: = 0)?;"
    r"|Py_(?:CLEAR|VISIT)\(\w+_module_state->__pyx_ptype_\w+\);)\n",
    re.MULTILINE,
)
_TYPE_VARIABLE = re.compile(r"\b__pyx_(?:ptype|vtabptr)_\w+")
# Every function calls this one when an exception leaves it.
_ON_EXCEPTION = "static void __Pyx_AddTraceback("


def improve(code: str) -> str:
    """Return the text of a C file that Cython has generated, with this module's changes.

    Raises ValueError if the text does not look like Cython's output.
    """
    if code.count(_PLACE) != 1 or _ON_EXCEPTION not in code:
        raise ValueError(
            "the C code does not look like Cython's output: the section module_code or the "
            "function __Pyx_AddTraceback is missing; check the version of Cython"
        )
    code = _WRAPPER.sub(_check_self, code)
    for cython_call, cached in _SITES:
        code = re.sub(cython_call, f"PENSTOCK_{cached}", code)
    code = _SELF_IS_NONE.sub("", code)
    code = _NONE_HAS_NO.sub(r"penstock_raise_none_has_no(\1);", code)
    code = code.replace(_ON_EXCEPTION, f"__attribute__((cold)) {_ON_EXCEPTION}", 1)
    code = _drop_unused_types(code)
    for rare in (_START, _AFTER_ERROR):
        code = rare.sub(lambda found: _RELEASE.sub("PENSTOCK_RELEASE(", found[0]), code)
    return code.replace(_PLACE, f"{_PLACE}\n{HEADER.read_text()}\n")


def _drop_unused_types(code: str) -> str:
    # Return the text without the imports of C classes of other modules that nothing in it uses.
    imports = _TYPE_IMPORTS.search(code)
    if imports is None:
        return code
    elsewhere = _DECLARES_TYPE.sub("", code[: imports.start()] + code[imports.end() :])
    used = set(_TYPE_VARIABLE.findall(elsewhere))

    def used_type(found: re.Match[str]) -> str:
        return found[0] if used & {found[1], found[2]} else ""

    def used_module(found: re.Match[str]) -> str:
        kept = _TYPE_IMPORT.sub(used_type, found[1])
        return found[0].replace(found[1], kept) if kept else ""

    kept = _MODULE_OF_TYPES.sub(used_module, imports[0])
    return code[: imports.start()] + kept + code[imports.end() :]


def _check_self(wrapper: re.Match[str]) -> str:
    # Return the text of a function that Python code calls, with a check of the type of `self`.
    struct = _STRUCT_OF_SELF.search(wrapper[0])
    start = _END_OF_DECLARATIONS.search(wrapper[0])
    if struct is None or start is None:
        raise ValueError(
            "cannot insert a check of the type of `self`: this C function has no such declarations "
            f"as Cython generates: {wrapper[0]}"
        )
    kind = f"__pyx_mstate_global->__pyx_ptype_{struct[1]}"
    check = (
        f"  if (unlikely(Py_TYPE(__pyx_v_self) != {kind}) "
        f"&& unlikely(penstock_refuse_self(__pyx_v_self, {kind}))) return NULL;\n"
    )
    return f"{wrapper[0][: start.end()]}{check}{wrapper[0][start.end() :]}"
