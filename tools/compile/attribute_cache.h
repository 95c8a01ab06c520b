/* Inline caches for attributes and method calls, in the C code that Cython generates.

Cython looks an attribute of a Python object up by name each time. CPython's own interpreter keeps
the result of a look-up beside each instruction, and so do these functions, by the same rule: a
result holds while the version of the object's type is the same. CPython gives no two states of
types the same version, and clears the version when the type or one of its bases changes.

A read or an assignment is cached if the attribute is a slot (__slots__, msgspec.Struct), a read also
if the attribute has a getter in C (a field of a C class). A call is cached if it calls what a slot
contains, or a method of an object without a dictionary, in which another attribute could hide it.
Everything else, errors included, is left to CPython. */

static CYTHON_UNUSED __attribute__((cold, noinline)) void penstock_raise_none_has_no(const char *name) {
    PyErr_Format(PyExc_AttributeError, "'NoneType' object has no attribute '%s'", name);
}

static CYTHON_UNUSED __attribute__((noinline)) int penstock_refuse_self(
    PyObject *object, PyTypeObject *type
) {
    if (PyType_IsSubtype(Py_TYPE(object), type)) return 0;
    PyErr_Format(
        PyExc_TypeError, "a method of '%s' was called for a '%s'", type->tp_name, Py_TYPE(object)->tp_name
    );
    return 1;
}

/* Releases a reference, or NULL, where the size of the code matters and its speed does not. */
static CYTHON_UNUSED __attribute__((noinline)) void penstock_release(PyObject *object) {
    Py_XDECREF(object);
}

#define PENSTOCK_RELEASE(object) penstock_release((PyObject *)(object))

#if defined(CYTHON_LIMITED_API) || defined(Py_GIL_DISABLED)

#define PENSTOCK_GET_ATTRIBUTE(object, name) __Pyx_PyObject_GetAttrStr(object, name)
#define PENSTOCK_SET_ATTRIBUTE(object, name, value) __Pyx_PyObject_SetAttrStr(object, name, value)
#define PENSTOCK_CALL_METHOD(name, args, nargsf) __Pyx_PyObject_FastCallMethod(name, args, nargsf)

#else

#include <structmember.h>

#define PENSTOCK_MAX_MISSES 64 /* look-ups after which a site with many types stops caching */

typedef struct {
    unsigned int no_version; /* bitwise complement of the type's version: 0 never matches */
    unsigned short offset;   /* of the slot in the object; 0: the attribute has a getter */
    unsigned short misses;
    PyGetSetDef *getter;
} penstock_attribute_site;

typedef struct {
    unsigned int no_version;
    unsigned short offset; /* of the slot in the object; 0: a method is called */
    unsigned short dictionary; /* offset of the object's dictionary, which must not exist; 0: none */
    unsigned short misses;
    PyObject *method; /* borrowed from the type, which has it while its version is the same */
} penstock_call_site;

static int penstock_is_slot(PyTypeObject *type, PyObject *found) {
    PyMemberDef *member;
    if (!Py_IS_TYPE(found, &PyMemberDescr_Type)) return 0;
    member = ((PyMemberDescrObject *)found)->d_member;
    return member->type == T_OBJECT_EX && member->flags == 0
        && member->offset > 0 && member->offset <= USHRT_MAX
        && PyType_IsSubtype(type, PyDescr_TYPE(found));
}

static __attribute__((noinline)) PyObject *penstock_look_up(
    PyObject *object, PyObject *name, penstock_attribute_site *site
) {
    PyObject *value = PyObject_GetAttr(object, name);
    PyTypeObject *type = Py_TYPE(object);
    PyObject *found;
    if (value == NULL || site->misses >= PENSTOCK_MAX_MISSES) return value;
    site->misses++;
    if (type->tp_getattro != PyObject_GenericGetAttr) return value;
    found = _PyType_Lookup(type, name);
    if (found == NULL || type->tp_version_tag == 0) return value;
    if (penstock_is_slot(type, found)) {
        site->offset = (unsigned short)((PyMemberDescrObject *)found)->d_member->offset;
        site->no_version = ~type->tp_version_tag;
    } else if (Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
        PyGetSetDef *getter = ((PyGetSetDescrObject *)found)->d_getset;
        if (getter->get != NULL && PyType_IsSubtype(type, PyDescr_TYPE(found))) {
            site->offset = 0;
            site->getter = getter;
            site->no_version = ~type->tp_version_tag;
        }
    }
    return value;
}

static CYTHON_UNUSED PyObject *penstock_get_attribute(
    PyObject *object, PyObject *name, penstock_attribute_site *site
) {
    if (likely(Py_TYPE(object)->tp_version_tag == ~site->no_version)) {
        PyObject *value;
        if (site->offset == 0) return site->getter->get(object, site->getter->closure);
        value = *(PyObject **)((char *)object + site->offset);
        if (likely(value != NULL)) {
            Py_INCREF(value);
            return value;
        }
    }
    return penstock_look_up(object, name, site);
}

static __attribute__((noinline)) int penstock_look_up_and_set(
    PyObject *object, PyObject *name, PyObject *value, penstock_attribute_site *site
) {
    PyTypeObject *type = Py_TYPE(object);
    if (site->misses < PENSTOCK_MAX_MISSES) {
        site->misses++;
        if (type->tp_setattro == PyObject_GenericSetAttr) {
            PyObject *found = _PyType_Lookup(type, name);
            if (found != NULL && type->tp_version_tag != 0 && penstock_is_slot(type, found)) {
                site->offset = (unsigned short)((PyMemberDescrObject *)found)->d_member->offset;
                site->no_version = ~type->tp_version_tag;
            }
        }
    }
    return PyObject_SetAttr(object, name, value);
}

static CYTHON_UNUSED int penstock_set_attribute(
    PyObject *object, PyObject *name, PyObject *value, penstock_attribute_site *site
) {
    if (likely(Py_TYPE(object)->tp_version_tag == ~site->no_version)) {
        PyObject **slot = (PyObject **)((char *)object + site->offset), *old = *slot;
        Py_INCREF(value);
        *slot = value;
        Py_XDECREF(old);
        return 0;
    }
    return penstock_look_up_and_set(object, name, value, site);
}

/* Returns the offset of a dictionary in objects of a type, 0 if they have none, -1 if elsewhere. */
static Py_ssize_t penstock_dictionary_offset(PyTypeObject *type) {
#ifdef Py_TPFLAGS_MANAGED_DICT
    if (type->tp_flags & Py_TPFLAGS_MANAGED_DICT) return -1;
#endif
    return type->tp_dictoffset;
}

static __attribute__((noinline)) PyObject *penstock_look_up_method(
    PyObject *name, PyObject *const *args, size_t nargsf, penstock_call_site *site
) {
    PyTypeObject *type = Py_TYPE(args[0]);
    if (site->misses < PENSTOCK_MAX_MISSES) {
        site->misses++;
        if (type->tp_getattro == PyObject_GenericGetAttr) {
            PyObject *found = _PyType_Lookup(type, name);
            Py_ssize_t dictionary = penstock_dictionary_offset(type);
            if (found == NULL || type->tp_version_tag == 0) {
                /* not cached */
            } else if (penstock_is_slot(type, found)) {
                site->offset = (unsigned short)((PyMemberDescrObject *)found)->d_member->offset;
                site->dictionary = 0;
                site->no_version = ~type->tp_version_tag;
            } else if (dictionary >= 0 && dictionary <= USHRT_MAX
                && PyType_HasFeature(Py_TYPE(found), Py_TPFLAGS_METHOD_DESCRIPTOR)) {
                site->offset = 0;
                site->dictionary = (unsigned short)dictionary;
                site->method = found;
                site->no_version = ~type->tp_version_tag;
            }
        }
    }
    return PyObject_VectorcallMethod(name, args, nargsf, NULL);
}

static CYTHON_UNUSED PyObject *penstock_call_method(
    PyObject *name, PyObject *const *args, size_t nargsf, penstock_call_site *site
) {
    if (likely(Py_TYPE(args[0])->tp_version_tag == ~site->no_version)
        && (site->dictionary == 0 || *(PyObject **)((char *)args[0] + site->dictionary) == NULL)) {
        PyObject *called = site->method, *result;
        nargsf &= ~(size_t)PY_VECTORCALL_ARGUMENTS_OFFSET;
        if (site->offset != 0) {
            called = *(PyObject **)((char *)args[0] + site->offset);
            if (unlikely(called == NULL)) return penstock_look_up_method(name, args, nargsf, site);
            /* The object itself is no argument; a method in the slot may put its own there. */
            args++;
            nargsf = (nargsf - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET;
        }
        Py_INCREF(called);
        result = PyObject_Vectorcall(called, args, nargsf, NULL);
        Py_DECREF(called);
        return result;
    }
    return penstock_look_up_method(name, args, nargsf, site);
}

#define PENSTOCK_GET_ATTRIBUTE(object, name) __extension__({ \
    static penstock_attribute_site penstock_site; \
    penstock_get_attribute(object, name, &penstock_site); \
})
#define PENSTOCK_SET_ATTRIBUTE(object, name, value) __extension__({ \
    static penstock_attribute_site penstock_site; \
    penstock_set_attribute(object, name, value, &penstock_site); \
})
#define PENSTOCK_CALL_METHOD(name, args, nargsf) __extension__({ \
    static penstock_call_site penstock_site; \
    penstock_call_method(name, args, nargsf, &penstock_site); \
})

#endif
