/* Moves the bytes of KV windows between sockets and memory without the interpreter lock.
 *
 * Python decides what is moved and where to; this module runs the loop of system calls for one
 * window, waits for the socket meanwhile, and computes the window's XXH3 digest. A thread that
 * computes in Python then delays a window once, and not at each call. pump.py loads it, and
 * iovec.py does the same in Python where it is missing.
 */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST_IOVECS 64              /* per call: the kernel copies all again after a short one */
#define IN_CACHE (512 << 10)        /* bytes that a core's cache still holds for the digest */
#define LARGE (256 << 10)           /* from here on, wait for many bytes at once */
#define HELD (64 << 10)             /* up to here, the first call keeps the interpreter lock */
#define LOOK_EVERY (4 << 20)        /* bytes between two looks at the stop descriptor */
#define CONTENDED_US 50             /* a longer sched_yield means that others want this core */
#define LEAST_PAUSE_US 1000         /* then this thread does not spin for so long */
#define MOST_PAUSE_US 512000

typedef int (*update_function)(void *state, const void *data, size_t size);

struct digest {
    update_function update;         /* NULL: no digest */
    void *state;
};

struct job {
    int fd, stop_fd, is_writing, patience_ms, spin_us;
    struct iovec *rows;
    long count;                     /* rows */
    size_t ahead, behind, total;    /* bytes before and after the window, and in all */
    size_t optional;                /* the last of `behind`: they are not waited for */
    struct digest digest;
    size_t moved;
    int stopped, error;
};

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* Where other threads want this core, each sched_yield can cost a whole turn of theirs, some
 * milliseconds. A thread that sleeps instead runs as soon as its bytes are there. */
static _Thread_local int64_t spin_again_us, pause_us;

/* Look repeatedly until now_us() is `until`. Return what poll returned last. */
static int spin(struct pollfd both[2], int64_t begin, int64_t until)
{
    for (;;) {
        int ready;
        int64_t end;
        sched_yield(); /* the peer may have been woken on this very core */
        ready = poll(both, 2, 0);
        end = now_us();
        if (end - begin > CONTENDED_US) {
            pause_us = pause_us == 0 ? LEAST_PAUSE_US
                     : pause_us < MOST_PAUSE_US ? 2 * pause_us : MOST_PAUSE_US;
            spin_again_us = end + pause_us;
            return ready;
        }
        if (ready != 0 || end >= until) {
            pause_us = 0;
            return ready;
        }
        begin = end;
    }
}

/* Wait for `events` of fd, or for stop_fd. First look repeatedly for spin_us, then sleep. */
static int wait_for(int fd, short events, int stop_fd, int64_t spin_us, int timeout_ms,
                    struct pollfd both[2])
{
    both[0] = (struct pollfd){fd, events, 0};
    both[1] = (struct pollfd){stop_fd, POLLIN, 0};
    if (spin_us > 0) {
        int64_t now = now_us();
        int ready = now < spin_again_us ? 0 : spin(both, now, now + spin_us);
        if (ready != 0)
            return ready;
    }
    return poll(both, 2, timeout_ms);
}

/* Pass the window's bytes in [from, from + size) of the job to the digest. */
static void feed(struct job *job, size_t from, size_t size)
{
    size_t begin = from > job->ahead ? from : job->ahead;
    size_t end = from + size, last = job->total - job->behind, at = 0;
    long row = 0;
    if (end > last)
        end = last;
    if (job->digest.update == NULL || begin >= end)
        return;
    for (; begin < end; at += job->rows[row++].iov_len) {
        size_t length = job->rows[row].iov_len;
        if (begin < at + length) {
            size_t here = at + length < end ? at + length - begin : end - begin;
            job->digest.update(job->digest.state, (char *)job->rows[row].iov_base + (begin - at),
                               here);
            begin += here;
        }
    }
}

/* One readv or writev of rows from byte `skip` of row `row` on. */
static ssize_t call(struct job *job, long row, size_t skip)
{
    long count = job->count - row, used;
    struct iovec first = job->rows[row], *last;
    size_t size = 0, cut = 0;
    ssize_t moved;
    if (count > MOST_IOVECS)
        count = MOST_IOVECS;
    job->rows[row].iov_base = (char *)first.iov_base + skip;
    job->rows[row].iov_len = first.iov_len - skip;
    last = job->rows + row;
    if (job->digest.update == NULL) {
        used = count;
    } else {
        for (used = 0; used < count && size < IN_CACHE; used++)
            size += job->rows[row + used].iov_len;
        last = job->rows + row + used - 1;
        cut = size > IN_CACHE ? size - IN_CACHE : 0;
        last->iov_len -= cut;
    }
    moved = job->is_writing ? writev(job->fd, job->rows + row, (int)used)
                            : readv(job->fd, job->rows + row, (int)used);
    last->iov_len += cut;
    job->rows[row] = first;
    return moved;
}

static void want(int fd, int *wanted, size_t size)
{
    int least = size > LARGE ? (size < IN_CACHE ? (int)size : IN_CACHE) : 1;
    if (least == *wanted)
        return;
    *wanted = least;
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least);
}

static void run(struct job *job, PyThreadState **unlocked)
{
    size_t needed = job->total - job->optional, looked = 0, at = 0;
    int64_t deadline = 0;
    int wanted = 1;
    long row = 0;
    while (job->moved < needed) {
        ssize_t moved;
        struct pollfd both[2];
        int left_ms = job->patience_ms;
        while (job->moved >= at + job->rows[row].iov_len)
            at += job->rows[row++].iov_len;
        moved = call(job, row, job->moved - at);
        if (moved > 0) {
            feed(job, job->moved, (size_t)moved);
            job->moved += (size_t)moved;
            if (job->moved - looked < LOOK_EVERY)
                continue;
            looked = job->moved;
            both[0] = (struct pollfd){job->stop_fd, POLLIN, 0};
            if (poll(both, 1, 0) > 0) {
                job->stopped = 1;
                break;
            }
            continue;
        }
        if (moved == 0)
            break; /* end of the stream: the next call reports it if this one has moved bytes */
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN) {
            job->error = errno;
            break;
        }
        job->error = EAGAIN;
        if (deadline == 0)
            deadline = now_us() + (int64_t)job->patience_ms * 1000;
        else
            left_ms = (int)((deadline - now_us()) / 1000);
        if (left_ms <= 0)
            break;
        if (*unlocked == NULL)
            *unlocked = PyEval_SaveThread();
        if (!job->is_writing)
            want(job->fd, &wanted, needed - job->moved);
        if (wait_for(job->fd, job->is_writing ? POLLOUT | POLLIN : POLLIN, job->stop_fd,
                     job->moved ? 0 : job->spin_us, left_ms, both) < 0 && errno != EINTR)
            break;
        if (both[1].revents) {
            job->stopped = 1;
            break;
        }
        if (job->is_writing && both[0].revents & POLLIN && !(both[0].revents & POLLOUT))
            break; /* the peer has sent a message, which its own thread of control must read */
        job->error = 0;
    }
    if (wanted != 1)
        want(job->fd, &wanted, 1);
}

PyDoc_STRVAR(move_doc,
    "move(fd, stop_fd, is_writing, rows, count, total, ahead, behind, optional, update,\n"
    "     state, patience_ms, spin_us) -> (moved, stopped)\n\n"
    "Read into or write from `count` iovecs at address `rows`, `total` bytes in all.\n\n"
    "Return once all bytes but the last `optional` have moved, after a wait of `patience_ms`\n"
    "for room or bytes, or when stop_fd is readable (stopped). `moved` is -1 if the first call would block,\n"
    "and 0 at the end of the stream. `update` and `state` are the addresses of an XXH3 function\n"
    "and its state, which consumes all bytes but the first `ahead` and the last `behind`; 0: none.\n"
    "Raises OSError.");

static PyObject *move(PyObject *module, PyObject *args)
{
    struct job job = {0};
    unsigned long long rows, update, state, total, ahead, behind, optional;
    PyThreadState *unlocked = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "iipKlKKKKKKii", &job.fd, &job.stop_fd, &job.is_writing,
                          &rows, &job.count, &total, &ahead, &behind, &optional, &update, &state,
                          &job.patience_ms, &job.spin_us))
        return NULL;
    job.rows = (struct iovec *)(uintptr_t)rows;
    job.total = (size_t)total, job.ahead = (size_t)ahead, job.behind = (size_t)behind;
    job.optional = (size_t)optional;
    job.digest.update = (update_function)(uintptr_t)update;
    job.digest.state = (void *)(uintptr_t)state;
    if (job.total > HELD)
        unlocked = PyEval_SaveThread();
    run(&job, &unlocked);
    if (unlocked != NULL)
        PyEval_RestoreThread(unlocked);
    if (job.moved == 0 && job.error != 0 && job.error != EAGAIN) {
        errno = job.error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("nO", job.moved == 0 && job.error == EAGAIN ? (Py_ssize_t)-1
                                                                     : (Py_ssize_t)job.moved,
                         job.stopped ? Py_True : Py_False);
}

PyDoc_STRVAR(wait_doc,
    "wait(fd, events, stop_fd, spin_us, timeout_ms) -> (events, stopped)\n\n"
    "Wait until poll(2) reports one of `events` for fd, or stop_fd is readable (stopped), without\n"
    "the interpreter lock. Look repeatedly for `spin_us` microseconds before sleeping. A timeout of\n"
    "-1 ms waits without end. Raises OSError.");

static PyObject *wait(PyObject *module, PyObject *args)
{
    struct pollfd both[2];
    int fd, events, stop_fd, spin_us, timeout_ms, ready;
    (void)module;
    if (!PyArg_ParseTuple(args, "iiiii", &fd, &events, &stop_fd, &spin_us, &timeout_ms))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    ready = wait_for(fd, (short)events, stop_fd, spin_us, timeout_ms, both);
    Py_END_ALLOW_THREADS
    if (ready < 0 && errno != EINTR)
        return PyErr_SetFromErrno(PyExc_OSError);
    return Py_BuildValue("iO", ready < 0 ? 0 : (int)both[0].revents,
                         ready > 0 && both[1].revents ? Py_True : Py_False);
}

/* The short calls below keep the interpreter lock: giving it up would cost more than they take,
 * and some milliseconds if another thread computes. */

static PyObject *result_of(ssize_t count)
{
    if (count >= 0)
        return PyLong_FromSsize_t(count);
    if (errno == EAGAIN || errno == EINTR)
        return PyLong_FromLong(-1);
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* The arguments of receive and send: a descriptor and a piece of memory. */
static int parse_piece(PyObject *args, int *fd, struct iovec *piece)
{
    unsigned long long address, size;
    if (!PyArg_ParseTuple(args, "iKK", fd, &address, &size))
        return 0;
    *piece = (struct iovec){(void *)(uintptr_t)address, (size_t)size};
    return 1;
}

PyDoc_STRVAR(receive_doc,
    "receive(fd, address, size) -> bytes read into memory, or -1 if the call would block.\n\n"
    "Raises OSError.");

static PyObject *receive(PyObject *module, PyObject *args)
{
    int fd;
    struct iovec piece;
    (void)module;
    return parse_piece(args, &fd, &piece) ? result_of(readv(fd, &piece, 1)) : NULL;
}

PyDoc_STRVAR(send_doc,
    "send(fd, address, size) -> bytes written from memory, or -1 if the call would block.\n\n"
    "Raises OSError.");

static PyObject *send_some(PyObject *module, PyObject *args)
{
    int fd;
    struct iovec piece;
    (void)module;
    return parse_piece(args, &fd, &piece) ? result_of(writev(fd, &piece, 1)) : NULL;
}

PyDoc_STRVAR(ring_doc, "ring(fd): Make the eventfd readable. Raises OSError.");

static PyObject *ring(PyObject *module, PyObject *args)
{
    int fd;
    uint64_t one = 1;
    (void)module;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    return result_of(write(fd, &one, sizeof one));
}

PyDoc_STRVAR(clear_doc, "clear(fd): Make the eventfd unreadable. Raises OSError.");

static PyObject *clear(PyObject *module, PyObject *args)
{
    int fd;
    uint64_t value;
    (void)module;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    return result_of(read(fd, &value, sizeof value));
}

static PyMethodDef methods[] = {
    {"clear", clear, METH_VARARGS, clear_doc},
    {"receive", receive, METH_VARARGS, receive_doc},
    {"ring", ring, METH_VARARGS, ring_doc},
    {"send", send_some, METH_VARARGS, send_doc},
    {"move", move, METH_VARARGS, move_doc},
    {"wait", wait, METH_VARARGS, wait_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_pump", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__pump(void)
{
    return PyModule_Create(&definition);
}
