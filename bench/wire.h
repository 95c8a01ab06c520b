/* Shared by the static backend and the load generator: time, sockets, byte buffers. Linux only. */
#pragma once
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* The time at which the test engine writes a chunk, a JSON string: nanoseconds of CLOCK_MONOTONIC. */
#define STAMP "\"sent_ns\":\""
#define STAMP_DIGITS 19

typedef struct {
    char *at;
    size_t len, cap;
} bytes_t;

static inline void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(2);
}

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static inline void room(bytes_t *b, size_t extra) {
    if (b->len + extra <= b->cap) return;
    while (b->cap < b->len + extra) b->cap = b->cap ? b->cap * 2 : 4096;
    b->at = realloc(b->at, b->cap);
    if (!b->at) die("realloc");
}

static inline void put(bytes_t *b, const void *from, size_t n) {
    room(b, n);
    memcpy(b->at + b->len, from, n);
    b->len += n;
}

static inline void nodelay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static inline struct sockaddr_in loopback(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

/* Wait in epoll until `until_ns` at most; a negative value means no limit. The resolution is a
 * nanosecond, because epoll_wait's millisecond would be too coarse for a TTFT. */
static inline int wait_events(int ep, struct epoll_event *ev, int n, int64_t until_ns) {
    struct timespec t = {0, 0}, *timeout = NULL;
    if (until_ns >= 0) {
        int64_t left = until_ns - now_ns();
        if (left > 0) t.tv_sec = left / 1000000000LL, t.tv_nsec = left % 1000000000LL;
        timeout = &t;
    }
    int got = epoll_pwait2(ep, ev, n, timeout, NULL);
    if (got < 0 && errno != EINTR) die("epoll_pwait2");
    return got < 0 ? 0 : got;
}

static inline void sharp_process(void) {
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1UL);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
}

/* Return the value of header `name` (lower case, with its colon) within [head, end), or NULL. */
static inline const char *header(const char *head, const char *end, const char *name) {
    size_t n = strlen(name);
    for (const char *line = head; line && line + n < end; ) {
        const char *stop = memchr(line, '\n', end - line);
        if (!stop) return NULL;
        line = stop + 1;
        if (line + n < end && strncasecmp(line, name, n) == 0) {
            line += n;
            while (*line == ' ') line++;
            return line;
        }
    }
    return NULL;
}
