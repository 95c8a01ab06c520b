/* Finds the members of a JSON object for json_object.py, without decoding their values.
 *
 * Only objects are recognised whose members every JSON parser reads alike; for all other text the
 * caller uses msgspec. Strings are searched 64 or 16 bytes at a time, because a long prompt is one
 * string.
 * The function is pure: it keeps no state, and does no I/O. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "policies/avx2.h"

#define MAX_DEPTH 32 /* of nested lists and objects */
#define MAX_DIGITS 18
#define MAX_MEMBERS 256
#define MAX_NAME 64

/* A text that is being read. The functions below return where they have stopped reading, or NULL if
 * the text is unusual or not JSON. */
struct text {
    const char *end;
    unsigned char high_bits; /* 0x80 if a byte outside ASCII was read */
};

static const char *skip_space(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) at++;
    return at;
}

static int is_digit(const char *at, const char *end) { return at < end && *at >= '0' && *at <= '9'; }

/* Read the four hexadecimal digits of an escape \uXXXX. Return their value, or -1. */
static long read_hex(const char *at, const char *end) {
    long value = 0;
    if (end - at < 4) return -1;
    for (int digit = 0; digit < 4; digit++, at++) {
        char low = *at | 0x20;
        if (*at >= '0' && *at <= '9') value = value * 16 + (*at - '0');
        else if (low >= 'a' && low <= 'f') value = value * 16 + (low - 'a' + 10);
        else return -1;
    }
    return value;
}

/* `at` follows a backslash. */
static const char *skip_escape(const char *at, const char *end) {
    if (at == end) return NULL;
    switch (*at) {
    case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't': return at + 1;
    case 'u': break;
    default: return NULL;
    }
    long code = read_hex(at + 1, end);
    if (code < 0 || (code >= 0xDC00 && code <= 0xDFFF)) return NULL;
    at += 5;
    if (code < 0xD800 || code > 0xDBFF) return at;
    if (end - at < 6 || at[0] != '\\' || at[1] != 'u') return NULL; /* half of a surrogate pair */
    code = read_hex(at + 2, end);
    return code >= 0xDC00 && code <= 0xDFFF ? at + 6 : NULL;
}

#ifdef WITH_AVX2
static int use_avx2;

/* Return the bits of the bytes that are a quote, a backslash or a control character. */
WITH_AVX2 static inline uint64_t stops_in(__m256i bytes) {
    const __m256i control = _mm256_set1_epi8(0x1f);
    __m256i stops = _mm256_or_si256(
        _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8('"')),
        _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8('\\'))
    );
    stops = _mm256_or_si256(stops, _mm256_cmpeq_epi8(_mm256_min_epu8(bytes, control), bytes));
    return (uint32_t)_mm256_movemask_epi8(stops);
}

/* Return where a quote, a backslash or a control character is first, or less than 64 bytes before
 * the end. */
WITH_AVX2 static const char *skip_plain_avx2(const char *at, struct text *text) {
    __m256i seen = _mm256_setzero_si256();
    for (; text->end - at >= 64; at += 64) {
        __m256i first = _mm256_loadu_si256((const __m256i *)at);
        __m256i second = _mm256_loadu_si256((const __m256i *)(at + 32));
        uint64_t stops = stops_in(first) | stops_in(second) << 32;
        if (stops) {
            int before = __builtin_ctzll(stops);
            uint64_t high = (uint32_t)_mm256_movemask_epi8(first);
            high |= (uint64_t)(uint32_t)_mm256_movemask_epi8(second) << 32;
            if (high & ((1ull << before) - 1)) text->high_bits = 0x80;
            at += before;
            break;
        }
        seen = _mm256_or_si256(seen, _mm256_or_si256(first, second));
    }
    if (_mm256_movemask_epi8(seen)) text->high_bits = 0x80;
    return at;
}
#endif

#ifdef __SSE2__
/* Return where a quote, a backslash or a control character is first, or less than 16 bytes before
 * the end. */
static const char *skip_plain(const char *at, struct text *text) {
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\');
    const __m128i control = _mm_set1_epi8(0x1f);
#ifdef WITH_AVX2
    const char *rare = at + 1024; /* from here on, quotes and escapes seem to be rare */
#endif
    for (; text->end - at >= 16; at += 16) {
        __m128i here = _mm_loadu_si128((const __m128i *)at);
        __m128i stop = _mm_or_si128(
            _mm_or_si128(_mm_cmpeq_epi8(here, quote), _mm_cmpeq_epi8(here, slash)),
            _mm_cmpeq_epi8(_mm_min_epu8(here, control), here)
        );
        unsigned found = (unsigned)_mm_movemask_epi8(stop), high = (unsigned)_mm_movemask_epi8(here);
        if (found) {
            int before = __builtin_ctz(found);
            if (high & ((1u << before) - 1)) text->high_bits = 0x80;
            return at + before;
        }
        if (high) text->high_bits = 0x80;
#ifdef WITH_AVX2
        /* The call itself takes as long as eight steps here. */
        if (at == rare && use_avx2) at = skip_plain_avx2(at + 16, text) - 16;
#endif
    }
    return at;
}
#else
static const char *skip_plain(const char *at, struct text *text) { return at; }
#endif

/* `at` follows the opening quote. */
static const char *skip_string(const char *at, struct text *text) {
    for (;;) {
        at = skip_plain(at, text);
        if (at == text->end || (unsigned char)*at < 0x20) return NULL;
        if (*at == '"') return at + 1;
        text->high_bits |= (unsigned char)*at & 0x80;
        if (*at != '\\') at++;
        else {
            do {
                if ((at = skip_escape(at + 1, text->end)) == NULL) return NULL;
            } while (at < text->end && *at == '\\');
        }
    }
}

static const char *skip_digits(const char *at, const char *end) {
    const char *start = at;
    while (is_digit(at, end)) at++;
    return at == start || at - start > MAX_DIGITS ? NULL : at;
}

/* Numbers with an exponent are unusual. */
static const char *skip_number(const char *at, const char *end) {
    if (at < end && *at == '-') at++;
    if (at < end && *at == '0') at++;
    else if ((at = skip_digits(at, end)) == NULL) return NULL;
    return at < end && *at == '.' ? skip_digits(at + 1, end) : at;
}

static const char *skip_word(const char *at, const char *end, const char *word) {
    Py_ssize_t size = (Py_ssize_t)strlen(word);
    return end - at >= size && !memcmp(at, word, size) ? at + size : NULL;
}

/* Skip a value other than a list or an object. */
static const char *skip_scalar(const char *at, struct text *text) {
    switch (*at) {
    case '"': return skip_string(at + 1, text);
    case 't': return skip_word(at, text->end, "true");
    case 'f': return skip_word(at, text->end, "false");
    case 'n': return skip_word(at, text->end, "null");
    default: return skip_number(at, text->end);
    }
}

/* Skip the colon after a name, and the space around it. */
static const char *skip_colon(const char *at, const char *end) {
    if (at == NULL) return NULL;
    at = skip_space(at, end);
    return at < end && *at == ':' ? skip_space(at + 1, end) : NULL;
}

static const char *skip_name(const char *at, struct text *text) {
    return at < text->end && *at == '"' ? skip_colon(skip_string(at + 1, text), text->end) : NULL;
}

static const char *skip_value(const char *at, struct text *text) {
    const char *end = text->end;
    uint32_t lists = 0; /* of the open lists and objects, innermost at bit 0: 1 for a list */
    int depth = 0;
    for (;;) {
        if (at == NULL || at == end) return NULL;
        if (*at == '[' || *at == '{') {
            if (++depth > MAX_DEPTH) return NULL;
            lists = lists << 1 | (*at == '[');
            at = skip_space(at + 1, end);
            if (at == end) return NULL;
            if (*at != ']' && *at != '}') { /* otherwise it is empty, and closed below */
                if (!(lists & 1)) at = skip_name(at, text);
                continue;
            }
        } else if ((at = skip_scalar(at, text)) == NULL) return NULL;
        for (; depth; depth--, lists >>= 1, at++) {
            at = skip_space(at, end);
            if (at == end) return NULL;
            if (*at != (lists & 1 ? ']' : '}')) break;
        }
        if (!depth) return at;
        if (*at != ',') return NULL;
        at = skip_space(at + 1, end);
        if (!(lists & 1)) at = skip_name(at, text);
    }
}

/* Return where a member's name ends if it has only letters, digits, - and _. */
static const char *skip_plain_name(const char *at, const char *end) {
    const char *start = at;
    for (; at < end && at - start < MAX_NAME; at++) {
        char low = *at | 0x20;
        if (!(low >= 'a' && low <= 'z') && !is_digit(at, end) && *at != '_' && *at != '-') break;
    }
    return at < end && *at == '"' ? at : NULL;
}

/* Add a member to the dictionary. Its value is made by `raw` from a view of its bytes. */
static int add(PyObject *members, PyObject *name, PyObject *view, Py_ssize_t from, Py_ssize_t to, PyObject *raw) {
    PyObject *bytes = name == NULL ? NULL : PySequence_GetSlice(view, from, to);
    PyObject *value = bytes == NULL ? NULL : PyObject_CallOneArg(raw, bytes);
    int failed = value == NULL || PyDict_SetItem(members, name, value);
    Py_XDECREF(name);
    Py_XDECREF(bytes);
    Py_XDECREF(value);
    return !failed;
}

/* Add the members of the object at `at`. Return 1 if all is usual, 0 if not, and -1 on an error. */
static int read_object(const char *start, struct text *text, PyObject *members, PyObject *view, PyObject *raw) {
    const char *end = text->end, *at = skip_space(start, end);
    if (at == end || *at++ != '{') return 0;
    for (int count = 0; count < MAX_MEMBERS; count++) {
        at = skip_space(at, end);
        if (at == end || *at++ != '"') return 0;
        const char *name = at, *name_end = skip_plain_name(at, end);
        const char *value = name_end == NULL ? NULL : skip_colon(name_end + 1, end);
        if (value == NULL || (at = skip_value(value, text)) == NULL) return 0;
        PyObject *key = PyUnicode_FromStringAndSize(name, name_end - name);
        if (!add(members, key, view, value - start, at - start, raw)) return -1;
        if (PyDict_GET_SIZE(members) == count) return 0; /* msgspec's caller rejects a duplicate */
        at = skip_space(at, end);
        if (at == end) return 0;
        if (*at == '}') return skip_space(at + 1, end) == end;
        if (*at++ != ',') return 0;
    }
    return 0;
}

static PyObject *find_members(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "bytes and a type are needed");
        return NULL;
    }
    const char *start = PyBytes_AS_STRING(args[0]);
    struct text text = {start + PyBytes_GET_SIZE(args[0]), 0};
    PyObject *view = PyMemoryView_FromObject(args[0]), *members = PyDict_New();
    int is_usual = -1;
    if (view != NULL && members != NULL) is_usual = read_object(start, &text, members, view, args[1]);
    PyObject *result = NULL;
    if (is_usual == 1) result = PyTuple_Pack(2, members, text.high_bits ? Py_False : Py_True);
    else if (is_usual == 0) result = Py_NewRef(Py_None);
    Py_XDECREF(view);
    Py_XDECREF(members);
    return result;
}

static PyMethodDef functions[] = {
    {"find_members", (PyCFunction)(void (*)(void))find_members, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL}
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_json_object", NULL, -1, functions, NULL, NULL, NULL, NULL
};

PyMODINIT_FUNC PyInit__json_object(void) {
#ifdef WITH_AVX2
    use_avx2 = has_avx2();
#endif
    return PyModule_Create(&module);
}
