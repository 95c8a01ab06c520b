/* Searches the bytes of HTTP messages for byte_scan.py, which does the same in Python.
 *
 * Every function has a counterpart in python_byte_scan.py, with the same name and the same results,
 * except that finish_reason() and usage_counts() leave more to their callers there. The functions
 * are pure: they keep no state, and do no I/O. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define MAX_DIGITS 15       /* of a count of tokens */
#define MAX_LENGTH_DIGITS 9 /* of a Content-Length */
#define USAGE "\"usage\":"
#define ERROR_NAME "\"error\""
#define FINISH_NAME "\"finish_reason\":"
#define LENGTH(text) ((Py_ssize_t)sizeof(text) - 1)

static const char *const REASONS[] = {
    "stop", "length", "tool_calls", "content_filter", "function_call", "abort"
};
#define REASON_COUNT ((int)(sizeof(REASONS) / sizeof(REASONS[0])))
static PyObject *reasons[REASON_COUNT]; /* the same texts as interned strings */

/* Check the number of arguments, and that the ones at the bits of `bytes_at` are bytes. */
static int check(PyObject *const *args, Py_ssize_t count, Py_ssize_t wanted, int bytes_at) {
    if (count != wanted) {
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
        return 0;
    }
    for (Py_ssize_t at = 0; at < count; at++)
        if ((bytes_at >> at & 1) && !PyBytes_Check(args[at])) {
            PyErr_SetString(PyExc_TypeError, "the text must be bytes");
            return 0;
        }
    return 1;
}

static int starts_with(const char *at, const char *end, const char *text, Py_ssize_t length) {
    return end - at >= length && !memcmp(at, text, length);
}

/* Read a message's head: `before`, the digits of its Content-Length, and `after`. Return where its
 * body begins, or NULL. */
static const char *read_head(
    const char *at, const char *end, PyObject *before, PyObject *after, Py_ssize_t *length
) {
    Py_ssize_t digits = 0;
    if (!starts_with(at, end, PyBytes_AS_STRING(before), PyBytes_GET_SIZE(before))) return NULL;
    at += PyBytes_GET_SIZE(before);
    Py_ssize_t most = at < end && *at == '0' ? 1 : MAX_LENGTH_DIGITS;
    for (*length = 0; at < end && *at >= '0' && *at <= '9' && digits < most; at++, digits++)
        *length = *length * 10 + (*at - '0');
    if (!digits) return NULL;
    if (!starts_with(at, end, PyBytes_AS_STRING(after), PyBytes_GET_SIZE(after))) return NULL;
    return at + PyBytes_GET_SIZE(after);
}

static PyObject *body_span(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t length;
    if (!check(args, count, 4, 0xd)) return NULL;
    Py_ssize_t offset = PyLong_AsSsize_t(args[1]), size = PyBytes_GET_SIZE(args[0]);
    if (offset < 0 || offset > size) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the offset is outside the text");
        return NULL;
    }
    const char *start = PyBytes_AS_STRING(args[0]);
    const char *at = read_head(start + offset, start + size, args[2], args[3], &length);
    if (at == NULL) Py_RETURN_NONE;
    PyObject *first = PyLong_FromSsize_t(at - start);
    PyObject *last = PyLong_FromSsize_t(at - start + length);
    PyObject *span = first == NULL || last == NULL ? NULL : PyTuple_Pack(2, first, last);
    Py_XDECREF(first);
    Py_XDECREF(last);
    return span;
}

static PyObject *whole_body(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t length;
    if (!check(args, count, 3, 0x7)) return NULL;
    const char *start = PyBytes_AS_STRING(args[0]), *end = start + PyBytes_GET_SIZE(args[0]);
    const char *at = read_head(start, end, args[1], args[2], &length);
    if (at == NULL || end - at != length) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize(at, length);
}

/* Return where `text`, of two bytes or more, occurs first between the two pointers, or NULL. Short
 * JSON has a quote every few bytes, so memchr() would cost more than this. */
static const char *find_first(const char *at, const char *end, const char *text, Py_ssize_t size) {
    for (; end - at >= size; at++)
        if (at[0] == text[0] && at[1] == text[1] && !memcmp(at, text, size)) return at;
    return NULL;
}

static PyObject *around_value(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (!check(args, count, 5, 0x3)) return NULL;
    const char *start = PyBytes_AS_STRING(args[0]), *name = PyBytes_AS_STRING(args[1]);
    Py_ssize_t size = PyBytes_GET_SIZE(args[0]), name_size = PyBytes_GET_SIZE(args[1]);
    Py_ssize_t value = PyLong_AsSsize_t(args[2]), most_before = PyLong_AsSsize_t(args[3]);
    Py_ssize_t most = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (value < 0 || most_before < 0 || name_size < 2) {
        PyErr_SetString(PyExc_ValueError, "a number is negative, or the name too short");
        return NULL;
    }
    if (size - value > most) Py_RETURN_NONE;
    const char *at = find_first(start, start + Py_MIN(size, most_before), name, name_size);
    if (at == NULL) Py_RETURN_NONE;
    Py_ssize_t before = at - start + name_size, after = size - before;
    after = value < after ? after - value : 0;
    PyObject *first = PyBytes_FromStringAndSize(start, Py_MIN(before + 1, size));
    PyObject *last = PyBytes_FromStringAndSize(start + size - after, after);
    PyObject *both = first == NULL || last == NULL ? NULL : PyTuple_Pack(2, first, last);
    Py_XDECREF(first);
    Py_XDECREF(last);
    return both;
}

static PyObject *has_error_name(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (!check(args, count, 3, 0x1)) return NULL;
    Py_ssize_t size = PyBytes_GET_SIZE(args[0]);
    Py_ssize_t offset = PyLong_AsSsize_t(args[1]), length = PyLong_AsSsize_t(args[2]);
    if (offset < 0 || length < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a number is negative");
        return NULL;
    }
    if (offset >= size) Py_RETURN_FALSE;
    const char *at = PyBytes_AS_STRING(args[0]) + offset;
    const char *end = at + Py_MIN(size - offset, length);
    return PyBool_FromLong(find_first(at, end, ERROR_NAME, LENGTH(ERROR_NAME)) != NULL);
}

/* What is found where one of the searched texts may begin: another event, or a text that makes the
 * events unusual. */
enum finding { NOTHING, EVENT, UNUSUAL };

static enum finding look_at(const char *at, const char *end, PyObject *reason) {
    switch (*at) {
    case '\n':
        return starts_with(at, end, "\ndata:", 6) ? EVENT : NOTHING;
    case '[':
        return starts_with(at, end, "[DONE]", 6) ? UNUSUAL : NOTHING;
    case '"':
        if (starts_with(at, end, USAGE, LENGTH(USAGE)) || starts_with(at, end, ERROR_NAME, LENGTH(ERROR_NAME))
            || starts_with(at, end, PyBytes_AS_STRING(reason), PyBytes_GET_SIZE(reason)))
            return UNUSUAL;
    }
    return NOTHING;
}

/* Return the number of events in the payload of a chunk; 0 if it is unusual. */
static long events_in(const char *at, const char *end, PyObject *reason) {
    long events = 1;
    if (!starts_with(at, end, "data:", 5) || end[-1] != '\n'
        || (end[-2] != '\n' && memcmp(end - 4, "\r\n\r\n", 4)))
        return 0;
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), line = _mm_set1_epi8('\n'), list = _mm_set1_epi8('[');
    const __m128i u = _mm_set1_epi8('u'), f = _mm_set1_epi8('f'), e = _mm_set1_epi8('e');
    const __m128i d = _mm_set1_epi8('d'), D = _mm_set1_epi8('D');
    for (; end - at > 16; at += 16) { /* a text can begin where its first two bytes are */
        __m128i here = _mm_loadu_si128((const __m128i *)at);
        __m128i next = _mm_loadu_si128((const __m128i *)(at + 1));
        __m128i name = _mm_or_si128(
            _mm_or_si128(_mm_cmpeq_epi8(next, u), _mm_cmpeq_epi8(next, f)), _mm_cmpeq_epi8(next, e)
        );
        __m128i event = _mm_and_si128(_mm_cmpeq_epi8(here, line), _mm_cmpeq_epi8(next, d));
        __m128i done = _mm_and_si128(_mm_cmpeq_epi8(here, list), _mm_cmpeq_epi8(next, D));
        name = _mm_and_si128(_mm_cmpeq_epi8(here, quote), name);
        unsigned found = (unsigned)_mm_movemask_epi8(_mm_or_si128(name, _mm_or_si128(event, done)));
        for (; found; found &= found - 1) {
            enum finding finding = look_at(at + __builtin_ctz(found), end, reason);
            if (finding == UNUSUAL) return 0;
            events += finding == EVENT;
        }
    }
#endif
    for (; at < end; at++) {
        enum finding finding = look_at(at, end, reason);
        if (finding == UNUSUAL) return 0;
        events += finding == EVENT;
    }
    return events;
}

/* Read the size line of a chunk, of at most three hexadecimal digits as engines write them. Return
 * where its payload begins, or NULL. */
static const char *read_size(const char *at, const char *end, Py_ssize_t *size) {
    const char *start = at;
    for (*size = 0; at < end && at < start + 4; at++) {
        if (*at >= '0' && *at <= '9') *size = *size * 16 + (*at - '0');
        else if (*at >= 'a' && *at <= 'f') *size = *size * 16 + (*at - 'a' + 10);
        else break;
    }
    if (at == start || at == start + 4 || *start == '0') return NULL;
    return starts_with(at, end, "\r\n", 2) ? at + 2 : NULL;
}

static PyObject *count_events(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long events = 0;
    if (!check(args, count, 2, 0x3)) return NULL;
    const char *at = PyBytes_AS_STRING(args[0]), *end = at + PyBytes_GET_SIZE(args[0]);
    while (at < end) {
        Py_ssize_t size;
        at = read_size(at, end, &size);
        if (at == NULL || end - at < size + 2 || memcmp(at + size, "\r\n", 2))
            return PyLong_FromLong(0);
        long found = events_in(at, at + size, args[1]);
        if (!found) return PyLong_FromLong(0);
        events += found;
        at += size + 2;
    }
    return PyLong_FromLong(events);
}

/* Return where `text` occurs last between the two pointers, or NULL. It has two bytes at least. */
static const char *find_last(const char *start, const char *end, const char *text, Py_ssize_t size) {
    const char *at = end - size;
#ifdef __SSE2__
    const __m128i first = _mm_set1_epi8(text[0]), second = _mm_set1_epi8(text[1]);
    for (; at - start >= 15; at -= 16) { /* it may begin at 16 places, of which `at` is the last */
        __m128i here = _mm_loadu_si128((const __m128i *)(at - 15));
        __m128i next = _mm_loadu_si128((const __m128i *)(at - 14));
        here = _mm_and_si128(_mm_cmpeq_epi8(here, first), _mm_cmpeq_epi8(next, second));
        for (unsigned found = (unsigned)_mm_movemask_epi8(here); found;) {
            int place = 31 - __builtin_clz(found);
            if (!memcmp(at - 15 + place, text, size)) return at - 15 + place;
            found &= ~(1u << place);
        }
    }
#endif
    for (; at >= start; at--)
        if (at[0] == text[0] && at[1] == text[1] && !memcmp(at, text, size)) return at;
    return NULL;
}

static PyObject *finish_reason(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (!check(args, count, 1, 0x1)) return NULL;
    const char *start = PyBytes_AS_STRING(args[0]), *end = start + PyBytes_GET_SIZE(args[0]);
    const char *at = find_last(start, end, FINISH_NAME, LENGTH(FINISH_NAME));
    if (at != NULL && (at += LENGTH(FINISH_NAME)) < end && *at++ == '"')
        for (int reason = 0; reason < REASON_COUNT; reason++) {
            Py_ssize_t size = (Py_ssize_t)strlen(REASONS[reason]);
            if (starts_with(at, end, REASONS[reason], size) && at + size < end && at[size] == '"')
                return Py_NewRef(reasons[reason]);
        }
    Py_RETURN_NONE;
}

/* Read a decimal number as JSON has it. Return what follows it, or NULL. */
static const char *read_number(const char *at, const char *end, int64_t *value) {
    const char *start = at;
    for (*value = 0; at < end && *at >= '0' && *at <= '9'; at++) {
        if (at - start == MAX_DIGITS) return NULL;
        *value = *value * 10 + (*at - '0');
    }
    return at == start || (*start == '0' && at > start + 1) ? NULL : at;
}

static int count_named(const char *name, Py_ssize_t size) {
    static const char *const names[] = {"prompt_tokens", "completion_tokens", "cached_tokens"};
    for (int at = 0; at < 3; at++)
        if ((Py_ssize_t)strlen(names[at]) == size && !memcmp(names[at], name, size)) return at;
    return -1;
}

/* Read the members of a JSON object whose values are numbers or null. Return whether there was
 * nothing else. Absent counts are left as they are; null makes them -1. */
static int read_counts(const char *at, const char *end, int64_t counts[3]) {
    if (at == end || *at++ != '{') return 0;
    for (;;) {
        int64_t value = -1;
        if (at == end || *at++ != '"') return 0;
        const char *name = at;
        while (at < end && ((*at >= 'a' && *at <= 'z') || *at == '_')) at++;
        Py_ssize_t size = at - name;
        if (!starts_with(at, end, "\":", 2)) return 0;
        at += 2;
        if (at < end && *at == ' ') at++;
        if (starts_with(at, end, "null", 4)) at += 4;
        else if ((at = read_number(at, end, &value)) == NULL) return 0;
        int which = count_named(name, size);
        if (which >= 0) counts[which] = value;
        if (at == end) return 0;
        if (*at == '}') return 1;
        if (*at++ != ',') return 0;
        if (at < end && *at == ' ') at++;
    }
}

static PyObject *usage_counts(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    int64_t counts[3] = {-1, -1, -1};
    if (!check(args, count, 1, 0x1)) return NULL;
    const char *start = PyBytes_AS_STRING(args[0]), *end = start + PyBytes_GET_SIZE(args[0]);
    const char *at = find_last(start, end, USAGE, LENGTH(USAGE));
    if (at == NULL) Py_RETURN_NONE;
    at += LENGTH(USAGE);
    if (!read_counts(at, end, counts)) Py_RETURN_NONE;
    PyObject *tuple = PyTuple_New(3);
    for (int each = 0; tuple != NULL && each < 3; each++) {
        PyObject *value = counts[each] < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(counts[each]);
        if (value == NULL) Py_CLEAR(tuple);
        else PyTuple_SET_ITEM(tuple, each, value);
    }
    return tuple;
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef functions[] = {
    FUNCTION(around_value), FUNCTION(body_span), FUNCTION(count_events), FUNCTION(finish_reason),
    FUNCTION(has_error_name), FUNCTION(usage_counts), FUNCTION(whole_body),
    {NULL, NULL, 0, NULL}
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_byte_scan", NULL, -1, functions, NULL, NULL, NULL, NULL
};

PyMODINIT_FUNC PyInit__byte_scan(void) {
    for (int reason = 0; reason < REASON_COUNT; reason++) {
        reasons[reason] = PyUnicode_InternFromString(REASONS[reason]);
        if (reasons[reason] == NULL) return NULL;
    }
    return PyModule_Create(&module);
}
