/* Joins the parts of HTTP messages, and writes numbers of log lines, for message_bytes.py.
 *
 * Every function has a counterpart in python_message_bytes.py, with the same name and the same
 * results. The functions are pure: they keep no state, and do no I/O. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define MAX_PARTS 8
#define MAX_TEXTS 3
#define MAX_DIGITS 20

struct part {
    const char *at;
    Py_ssize_t size;
};

/* A message that is being put together. `encoded` has the bytes of those texts that are not ASCII. */
struct message {
    struct part parts[MAX_PARTS];
    PyObject *encoded[MAX_TEXTS];
    char digits[MAX_DIGITS];
    int count, encoded_count;
};

static void add(struct message *message, const char *at, Py_ssize_t size) {
    message->parts[message->count++] = (struct part){at, size};
}

#define ADD(message, text) add(message, text, (Py_ssize_t)sizeof(text) - 1)

static int add_bytes(struct message *message, PyObject *bytes) {
    if (!PyBytes_Check(bytes)) {
        PyErr_SetString(PyExc_TypeError, "bytes are needed");
        return 0;
    }
    add(message, PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes));
    return 1;
}

static int add_text(struct message *message, PyObject *text) {
    if (!PyUnicode_Check(text)) {
        PyErr_SetString(PyExc_TypeError, "a text is needed");
        return 0;
    }
    if (PyUnicode_IS_COMPACT_ASCII(text)) {
        add(message, PyUnicode_DATA(text), PyUnicode_GET_LENGTH(text));
        return 1;
    }
    PyObject *encoded = PyUnicode_AsEncodedString(text, "utf-8", "surrogateescape");
    if (encoded == NULL) return 0;
    message->encoded[message->encoded_count++] = encoded;
    return add_bytes(message, encoded);
}

/* Write a number's digits so that they end before `end`. Return where they begin. */
static char *write_digits(char *end, uint64_t number) {
    do {
        *--end = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    return end;
}

static void add_number(struct message *message, Py_ssize_t number) {
    char *end = message->digits + MAX_DIGITS, *at = write_digits(end, (uint64_t)number);
    add(message, at, end - at);
}

/* Return the message as bytes, or NULL unless `is_whole`. */
static PyObject *finish(struct message *message, int is_whole) {
    PyObject *bytes = NULL;
    if (is_whole) {
        Py_ssize_t size = 0;
        for (int each = 0; each < message->count; each++) size += message->parts[each].size;
        bytes = PyBytes_FromStringAndSize(NULL, size);
    }
    if (bytes != NULL) {
        char *at = PyBytes_AS_STRING(bytes);
        for (int each = 0; each < message->count; each++) {
            memcpy(at, message->parts[each].at, (size_t)message->parts[each].size);
            at += message->parts[each].size;
        }
    }
    for (int each = 0; each < message->encoded_count; each++) Py_DECREF(message->encoded[each]);
    return bytes;
}

static int check_count(Py_ssize_t count, Py_ssize_t wanted) {
    if (count == wanted) return 1;
    PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    return 0;
}

static PyObject *request_head(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    struct message message = {.count = 0, .encoded_count = 0};
    if (!check_count(count, 4)) return NULL;
    Py_ssize_t length = PyLong_AsSsize_t(args[2]);
    if (length < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the length is negative");
        return NULL;
    }
    if (!add_bytes(&message, args[0])) return NULL;
    ADD(&message, "x-request-id: ");
    if (!add_text(&message, args[1])) return finish(&message, 0);
    ADD(&message, "\r\ncontent-length: ");
    add_number(&message, length);
    ADD(&message, "\r\n");
    int is_whole = add_text(&message, args[3]);
    ADD(&message, "\r\n");
    return finish(&message, is_whole);
}

static PyObject *response_lines(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    struct message message = {.count = 0, .encoded_count = 0};
    if (!check_count(count, 3) || !add_text(&message, args[0])) return NULL;
    ADD(&message, "x-request-id: ");
    if (!add_text(&message, args[1])) return finish(&message, 0);
    ADD(&message, "\r\nx-penstock-endpoint: ");
    int is_whole = add_text(&message, args[2]);
    ADD(&message, "\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n");
    return finish(&message, is_whole);
}

static PyObject *whole_response(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    struct message message = {.count = 0, .encoded_count = 0};
    if (!check_count(count, 3)) return NULL;
    if (!add_bytes(&message, args[0]) || !add_bytes(&message, args[1])) return NULL;
    if (!PyBytes_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "bytes are needed");
        return NULL;
    }
    ADD(&message, "content-length: ");
    add_number(&message, PyBytes_GET_SIZE(args[2]));
    ADD(&message, "\r\n\r\n");
    add_bytes(&message, args[2]);
    return finish(&message, 1);
}

static PyObject *json_numbers(PyObject *self, PyObject *numbers) {
    Py_buffer view;
    if (PyObject_GetBuffer(numbers, &view, PyBUF_SIMPLE)) return NULL;
    Py_ssize_t count = view.len / 8;
    /* The list is written from its end, because that is how digits are found. */
    PyObject *longest = PyBytes_FromStringAndSize(NULL, 2 + count * (MAX_DIGITS + 1));
    PyObject *list = NULL;
    if (longest != NULL) {
        char *end = PyBytes_AS_STRING(longest) + PyBytes_GET_SIZE(longest), *at = end;
        *--at = ']';
        for (Py_ssize_t index = count - 1; index >= 0; index--) {
            uint64_t number;
            memcpy(&number, (const char *)view.buf + 8 * index, 8);
            at = write_digits(at, number);
            if (index) *--at = ',';
        }
        *--at = '[';
        list = PyBytes_FromStringAndSize(at, end - at);
        Py_DECREF(longest);
    }
    PyBuffer_Release(&view);
    return list;
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef functions[] = {
    FUNCTION(request_head), FUNCTION(response_lines), FUNCTION(whole_response),
    {"json_numbers", json_numbers, METH_O, NULL},
    {NULL, NULL, 0, NULL}
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_message_bytes", NULL, -1, functions, NULL, NULL, NULL, NULL
};

PyMODINIT_FUNC PyInit__message_bytes(void) { return PyModule_Create(&module); }
