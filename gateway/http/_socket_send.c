/* Sends bytes to a socket, for socket_send.py, which does the same in Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <sys/socket.h>

static PyObject *send_now(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !PyLong_Check(args[0]) || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a descriptor and bytes are needed");
        return NULL;
    }
    long descriptor = PyLong_AsLong(args[0]);
    if (descriptor == -1 && PyErr_Occurred()) return NULL;
    ssize_t sent;
    do { /* it does not block, so the interpreter lock is kept, as in uvloop */
        sent = send(
            (int)descriptor, PyBytes_AS_STRING(args[1]), (size_t)PyBytes_GET_SIZE(args[1]),
            MSG_DONTWAIT | MSG_NOSIGNAL
        );
    } while (sent < 0 && errno == EINTR);
    return PyLong_FromSsize_t(sent < 0 ? 0 : sent);
}

static PyMethodDef functions[] = {
    {"send_now", (PyCFunction)(void (*)(void))send_now, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_socket_send", NULL, -1, functions, NULL, NULL, NULL, NULL
};

PyMODINIT_FUNC PyInit__socket_send(void) { return PyModule_Create(&module); }
