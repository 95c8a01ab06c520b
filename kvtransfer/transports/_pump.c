/* Moves the bytes of KV windows between sockets and memory without the interpreter lock.
 *
 * Python decides what is moved and where to; this module runs the loop of system calls for one
 * window, or for a batch of windows that Python has prepared, waits for the socket meanwhile, and
 * computes the windows' XXH3 digests. A thread that computes in Python then delays a batch once,
 * and not at each call. pump.py loads it, and iovec.py does the same in Python where it is missing.
 */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST_IOVECS 64              /* per call: the kernel copies all again after a short one */
#define IN_CACHE (512 << 10)        /* bytes that a core's cache still holds for the digest */
#define LARGE (256 << 10)           /* from here on, wait for many bytes at once */
#define HELD (64 << 10)             /* up to here, the first call keeps the interpreter lock */
#define TRAILER 24                  /* protocol/frame.py: verdict u8, 7 zeros, digest u64, 8 zeros */
#define FRAME 60                    /* a window's preamble and header */
#define LOOK_EVERY (4 << 20)        /* bytes between two looks at the stop descriptor */
#define MESSAGE_US 100000           /* how long a batch that is sent lets messages wait */
#define IDLE_MS 200                 /* how long a call waits without a byte */
#define NEXT_MS 1                   /* how long a verified window waits for the next to begin */
#define FIRST_MS 200                /* how long a call waits for the first window to begin */
#define CONTENDED_US 50             /* a longer sched_yield means that others want this core */
#define LEAST_PAUSE_US 1000         /* then this thread does not spin for so long */
#define MOST_PAUSE_US 512000

typedef int (*update_function)(void *state, const void *data, size_t size);

typedef int (*reset_function)(void *state);
typedef uint64_t (*digest_function)(const void *state);

struct digest {
    update_function update;         /* NULL: no digest */
    reset_function reset;           /* this and the next are for batches only */
    digest_function digest;
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
    int64_t deadline_us;            /* set at the first wait */
    int64_t deaf_until_us;          /* until then, the peer's messages do not end the call */
    size_t unlooked;                /* bytes since the last look at the stop descriptor */
    uint64_t *progress;             /* NULL, or a count of all bytes that moves on with them */
};

/* One window of a batch: window_batch.py fills a table of them. */
struct window {
    uint64_t rows;                  /* its iovecs; the rows before and after them are free */
    uint64_t count;                 /* iovecs */
    uint64_t size;                  /* bytes of KV that have not moved yet */
    uint64_t frame;                 /* the bytes before it: trailer of the last window, own header */
    uint64_t frame_size;            /* 0: a window that has begun, which only the first one may */
    /* Which generations its blocks must have at the source; live: NULL or a word that must not
     * be 0. */
    uint64_t generations, blocks, promised, block_count, live;
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
    size_t needed = job->total - job->optional, at = 0;
    int wanted = 0;                 /* not set here: Python may have set another one */
    int is_idle = 0;                /* no byte has moved for IDLE_MS */
    long row = 0;
    while (job->moved < needed) {
        ssize_t moved;
        struct pollfd both[2];
        short events = POLLIN;
        int ready;
        int left_ms = job->patience_ms;
        while (job->moved >= at + job->rows[row].iov_len)
            at += job->rows[row++].iov_len;
        moved = call(job, row, job->moved - at);
        if (moved > 0) {
            is_idle = 0;
            feed(job, job->moved, (size_t)moved);
            job->moved += (size_t)moved;
            job->unlooked += (size_t)moved;
            if (job->progress != NULL)
                __atomic_fetch_add(job->progress, (uint64_t)moved, __ATOMIC_RELAXED);
            if (job->unlooked < LOOK_EVERY)
                continue;
            job->unlooked = 0;
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
        if (job->deadline_us == 0)
            job->deadline_us = now_us() + (int64_t)job->patience_ms * 1000;
        else
            left_ms = (int)((job->deadline_us - now_us()) / 1000);
        if (left_ms <= 0 || is_idle)
            break;
        if (*unlocked == NULL)
            *unlocked = PyEval_SaveThread();
        if (job->is_writing) {
            int64_t deaf_us = job->deaf_until_us == 0 ? 0 : job->deaf_until_us - now_us();
            events = deaf_us > 0 ? POLLOUT : POLLOUT | POLLIN;
            if (deaf_us > 0 && deaf_us / 1000 + 1 < left_ms)
                left_ms = (int)(deaf_us / 1000) + 1;
        } else {
            want(job->fd, &wanted, needed - job->moved);
        }
        is_idle = left_ms > IDLE_MS;
        ready = wait_for(job->fd, events, job->stop_fd, job->moved ? 0 : job->spin_us,
                         is_idle ? IDLE_MS : left_ms, both);
        if (ready < 0 && errno != EINTR)
            break;
        is_idle = is_idle && ready == 0;
        if (both[1].revents) {
            job->stopped = 1;
            break;
        }
        if (job->is_writing && both[0].revents & POLLIN && !(both[0].revents & POLLOUT))
            break; /* the peer has sent a message, which its own thread of control must read */
        job->error = 0;
    }
    if (wanted > 1)
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

/* Begin with `size` bytes at count rows; `ahead` and `behind` are not the window's. */
static void begin(struct job *job, struct iovec *rows, long count, size_t ahead, size_t size,
                  size_t behind)
{
    job->rows = rows, job->count = count;
    job->ahead = ahead, job->behind = behind, job->total = ahead + size + behind;
    job->optional = 0, job->moved = 0, job->error = 0;
}

static void *memory_at(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

/* Write the trailer of an intact window, with the digest of its bytes. */
static void write_trailer(struct job *job, unsigned char *trailer)
{
    uint64_t digest = job->digest.update == NULL ? 0 : job->digest.digest(job->digest.state);
    int i;
    memset(trailer, 0, TRAILER);
    for (i = 0; i < 8; i++)
        trailer[8 + i] = (unsigned char)(digest >> 8 * i);
}

/* Whether no block of the window has changed its owner. */
static int is_current(const struct window *window)
{
    const volatile uint32_t *generations = memory_at(window->generations);
    const volatile uint32_t *live = memory_at(window->live);
    const int64_t *blocks = memory_at(window->blocks);
    const uint32_t *promised = memory_at(window->promised);
    uint64_t i;
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* after the reads of the blocks, and before */
    if (live != NULL && *live == 0)
        return 0;
    for (i = 0; i < window->block_count; i++)
        if (generations[blocks[i]] != promised[i])
            return 0;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return 1;
}

static int has_message(int fd)
{
    struct pollfd one = {fd, POLLIN, 0};
    return poll(&one, 1, 0) > 0;
}

static struct job *parse_batch(PyObject *args, struct job *job, struct window **windows,
                               long *count, unsigned char **stage)
{
    unsigned long long table, buffer, progress, update, reset, digest, state;
    if (!PyArg_ParseTuple(args, "iiKlKKKKKKii", &job->fd, &job->stop_fd, &table, count, &buffer,
                          &progress, &update, &reset, &digest, &state, &job->patience_ms,
                          &job->spin_us))
        return NULL;
    job->progress = memory_at(progress);
    *windows = memory_at(table), *stage = memory_at(buffer);
    job->digest.update = (update_function)(uintptr_t)update;
    job->digest.reset = (reset_function)(uintptr_t)reset;
    job->digest.digest = (digest_function)(uintptr_t)digest;
    job->digest.state = memory_at(state);
    return job;
}

static PyObject *batch_result(const struct job *job, long index, size_t moved, size_t all)
{
    if (all == 0 && job->error != 0 && job->error != EAGAIN) {
        errno = job->error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("lnnO", index,
                         all == 0 && job->error == EAGAIN ? (Py_ssize_t)-1 : (Py_ssize_t)moved,
                         (Py_ssize_t)all, job->stopped ? Py_True : Py_False);
}

/* Write the trailer of the window that has just been written, and return the number of its bytes
 * that have left. */
static size_t send_trailer(struct job *job, unsigned char *trailer, PyThreadState **unlocked)
{
    struct iovec row = {trailer, TRAILER};
    write_trailer(job, trailer);
    job->digest.update = NULL;
    begin(job, &row, 1, 0, TRAILER, 0);
    run(job, unlocked);
    return job->moved;
}

PyDoc_STRVAR(send_windows_doc,
    "send_windows(fd, stop_fd, windows, count, trailer, progress, update, reset, digest, state,\n"
    "             patience_ms, spin_us) -> (index, moved, all, stopped)\n\n"
    "Write a batch of windows, each behind its frame: the trailer of the window before it, which\n"
    "is filled in here, and its header. A window is begun only while its blocks and those of the\n"
    "last one are current. The trailer of the last window is written at address `trailer`, and\n"
    "leaves too if the window's blocks are current. `moved` is the number of bytes of window\n"
    "`index`, the last one begun, with its frame and what has left of that trailer. `all`: bytes\n"
    "of all windows. After a while a message of the peer ends the batch. Else like move.");

static PyObject *send_windows(PyObject *module, PyObject *args)
{
    struct job job = {0};
    struct window *windows, *window;
    unsigned char *trailer;
    PyThreadState *unlocked;
    size_t moved, all = 0;
    int64_t begin_us;
    long count;
    (void)module;
    if (parse_batch(args, &job, &windows, &count, &trailer) == NULL)
        return NULL;
    job.is_writing = 1;
    begin_us = now_us();
    /* Credit that returns meanwhile is not needed before the windows that are here. */
    job.deaf_until_us = begin_us + MESSAGE_US;
    unlocked = PyEval_SaveThread();
    for (window = windows;; window++) {
        struct iovec *rows = memory_at(window->rows);
        int ahead = window->frame_size > 0;
        if (ahead)
            rows[-1] = (struct iovec){memory_at(window->frame), (size_t)window->frame_size};
        begin(&job, rows - ahead, (long)window->count + ahead, (size_t)window->frame_size,
              (size_t)window->size, 0);
        run(&job, &unlocked);
        moved = job.moved;
        all += moved;
        if (moved < job.total || job.stopped)
            break;
        if (window + 1 == windows + count) {
            /* Without it, the peer would wait until this thread has the lock again. */
            size_t behind = is_current(window) ? send_trailer(&job, trailer, &unlocked) : 0;
            moved += behind;
            all += behind;
            break;
        }
        if (now_us() > begin_us + MESSAGE_US && has_message(job.fd))
            break;
        if (!is_current(window) || !is_current(window + 1))
            break;
        write_trailer(&job, memory_at(window[1].frame));
        if (job.digest.update != NULL)
            job.digest.reset(job.digest.state);
    }
    PyEval_RestoreThread(unlocked);
    return batch_result(&job, window - windows, moved, all);
}

/* Read a window's header behind the `have` bytes of it that are at `at`, and return how many are
 * there. Stop at a byte that differs from `header`. The first byte may take `first_ms`. */
static size_t read_header(struct job *job, unsigned char *at, size_t have,
                          const unsigned char *header, int first_ms, PyThreadState **unlocked)
{
    const struct job outer = *job;
    job->digest.update = NULL;
    while (have < FRAME && !job->stopped && memcmp(at, header, have) == 0) {
        struct iovec rest = {at + have, FRAME - have};
        int most_ms = have == 0 ? first_ms : NEXT_MS;
        job->patience_ms = outer.patience_ms < most_ms ? outer.patience_ms : most_ms;
        job->deadline_us = 0;
        begin(job, &rest, 1, 0, rest.iov_len, 0);
        job->optional = rest.iov_len - 1;
        run(job, unlocked);
        if (job->moved == 0)
            break;
        have += job->moved;
    }
    job->digest = outer.digest;
    job->deadline_us = outer.deadline_us, job->patience_ms = outer.patience_ms;
    return have;
}

PyDoc_STRVAR(receive_windows_doc,
    "receive_windows(fd, stop_fd, windows, count, stage, progress, update, reset, digest, state,\n"
    "                patience_ms, spin_us) -> (index, moved, all, stopped)\n\n"
    "Read a batch of windows. The first one has begun, or has a frame: then its header is waited\n"
    "for. What follows a window is read into `stage`. The next window begins only if that is an\n"
    "intact window's trailer and exactly the next header of the table. `moved` is the number of\n"
    "bytes of window `index`, the last one begun, and behind it; all windows before it are intact.\n"
    "If no window has begun, `index` is -1 and `stage` has `moved` bytes. `all`: all bytes that\n"
    "were read, which are added to the word at `progress` as they arrive. A window whose successor\n"
    "does not begin soon ends the batch, so that it is reported and its credit returns. Else like\n"
    "move.");

static PyObject *receive_windows(PyObject *module, PyObject *args)
{
    struct job job = {0};
    struct window *windows, *window;
    const unsigned char *header = NULL;
    unsigned char *stage, trailer[TRAILER];
    PyThreadState *unlocked = NULL;
    size_t moved = 0, all = 0, size;
    long count;
    int has_begun, is_next_due;
    (void)module;
    if (parse_batch(args, &job, &windows, &count, &stage) == NULL)
        return NULL;
    has_begun = windows->frame_size == 0;
    if (!has_begun) {
        /* If a message is there instead, the lock is kept. */
        header = (unsigned char *)memory_at(windows->frame) + TRAILER;
        moved = all = read_header(&job, stage, 0, header, FIRST_MS, &unlocked);
        has_begun = moved == FRAME && memcmp(stage, header, FRAME) == 0;
    }
    if (has_begun && unlocked == NULL)
        unlocked = PyEval_SaveThread();
    for (window = windows; has_begun; window++) {
        struct iovec *rows = memory_at(window->rows);
        rows[window->count] = (struct iovec){stage, TRAILER + FRAME};
        size = (size_t)window->size;
        begin(&job, rows, (long)window->count + 1, 0, size, TRAILER + FRAME);
        job.optional = FRAME;
        run(&job, &unlocked);
        moved = job.moved;
        is_next_due = moved >= size + TRAILER && !job.stopped && window + 1 < windows + count;
        if (is_next_due) {
            header = (unsigned char *)memory_at(window[1].frame) + TRAILER;
            moved = size + TRAILER + read_header(&job, stage + TRAILER, moved - size - TRAILER,
                                                 header, NEXT_MS, &unlocked);
        }
        all += moved;
        if (!is_next_due || job.stopped || moved < size + TRAILER + FRAME
            || memcmp(stage + TRAILER, header, FRAME) != 0)
            break;
        write_trailer(&job, trailer);
        if (memcmp(stage, trailer, TRAILER) != 0)
            break;
        if (job.digest.update != NULL)
            job.digest.reset(job.digest.state);
    }
    if (unlocked != NULL)
        PyEval_RestoreThread(unlocked);
    return batch_result(&job, has_begun ? window - windows : -1, moved, all);
}

PyDoc_STRVAR(wait_doc,
    "wait(fd, events, stop_fd, spin_us, timeout_ms) -> (events, stopped)\n\n"
    "Wait until poll(2) reports one of `events` for fd, or stop_fd is readable (stopped), without\n"
    "the interpreter lock, which is kept if that is so already. Look repeatedly for `spin_us`\n"
    "microseconds before sleeping. A timeout of -1 ms waits without end. Raises OSError.");

static PyObject *wait(PyObject *module, PyObject *args)
{
    struct pollfd both[2];
    int fd, events, stop_fd, spin_us, timeout_ms, ready;
    (void)module;
    if (!PyArg_ParseTuple(args, "iiiii", &fd, &events, &stop_fd, &spin_us, &timeout_ms))
        return NULL;
    /* After a batch, the next bytes are often there. To give up the lock would then cost a turn of
     * another thread, and save nothing. */
    both[0] = (struct pollfd){fd, (short)events, 0};
    both[1] = (struct pollfd){stop_fd, POLLIN, 0};
    ready = poll(both, 2, 0);
    if (ready <= 0) {
        Py_BEGIN_ALLOW_THREADS
        ready = wait_for(fd, (short)events, stop_fd, spin_us, timeout_ms, both);
        Py_END_ALLOW_THREADS
    }
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
    {"receive_windows", receive_windows, METH_VARARGS, receive_windows_doc},
    {"ring", ring, METH_VARARGS, ring_doc},
    {"send", send_some, METH_VARARGS, send_doc},
    {"send_windows", send_windows, METH_VARARGS, send_windows_doc},
    {"move", move, METH_VARARGS, move_doc},
    {"wait", wait, METH_VARARGS, wait_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_pump", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

/* Increase it, here and in pump.py, when what a function's arguments mean changes. */
#define INTERFACE 2

PyMODINIT_FUNC PyInit__pump(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
