/* A minimal HTTP/1.1 load generator: one thread, one epoll, latencies in microseconds, and the CPU of
 * the gateway in the window.
 *
 *     load --port P --bodies FILE --mode closed|open [--connections C] [--rate R] [--warmup-ms W] [--window-ms D]
 *          [--ramp-ms M] [--events-per-stream E] [--cpu-pids 1,2,3] [--stamped 0|1]
 *
 * closed: C connections, each of which sends the next request after its answer.
 * open:   R requests per second, independent of the answers. A latency counts from the intended send
 *         time; idle connections are reused.
 * FILE:   request bodies, each as <u32 length><bytes>, used in turn. Sixteen '#' in a body are replaced
 *         by the request's number, so that prompts share a prefix but are never equal.
 *
 * stamped: chunks contain the time at which the test engine wrote them (bench/backend.c). delay_s is the
 *         time from then until a chunk is read here; gap_s, how much longer the delay of a chunk is than
 *         that of the stream's chunk before it. Both run on one machine, whose clock they share.
 *
 * Prints one JSON object; requests, events and CPU are those of the window. streaming: connections in the
 * middle of a stream when the window begins and when it ends.
 */
#include "wire.h"

typedef struct { const char *before, *after; size_t before_n, after_n; char head[256]; int head_n; } body_t;
typedef struct { double *at; size_t n, cap; } samples_t;
enum state { IDLE, HEAD, LENGTH, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER };

typedef struct conn {
    int fd;
    enum state state;
    bool busy, reused, first_seen, chunked, close_after;
    int status, newlines;
    long left, events;
    int64_t asked_ns, delay_ns; /* delay_ns: of the last stamped chunk, 0 before the first */
    struct iovec part[4];
    int part_n, part_at;
    char unique[17], head[8192];
    size_t head_n;
    struct conn *next_idle;
} conn_t;

static struct {
    int port, connections, window_ms, warmup_ms, ramp_ms, pid_n, pids[256];
    long expected_events;
    double rate;
    bool open, stamped;
} opt = {.port = 8080, .connections = 32, .window_ms = 2000, .warmup_ms = 500, .rate = 100};

static struct { long requests, events, connect, status, framing, closed, mismatch, opened, late; int64_t bytes; int bad_status; } count;
static samples_t latency, ttft, delay, gap;
static body_t *bodies;
static size_t body_n;
static uint64_t serial;
static int ep;
static bool measuring, stopping;
static conn_t *idle;

static void note(samples_t *s, double v) {
    if (s->n == s->cap) s->at = realloc(s->at, (s->cap = s->cap ? s->cap * 2 : 65536) * sizeof *s->at);
    s->at[s->n++] = v;
}

static int ascending(const void *a, const void *b) { double x = *(double *)a, y = *(double *)b; return (x > y) - (x < y); }

static void print_samples(const char *name, samples_t *s) {
    double sum = 0;
    qsort(s->at, s->n, sizeof *s->at, ascending);
    for (size_t i = 0; i < s->n; i++) sum += s->at[i];
#define Q(q) (s->n ? s->at[(size_t)((s->n - 1) * (q))] : 0.0)
    printf(",\"%s\":{\"n\":%zu,\"mean\":%.6f,\"p50\":%.6f,\"p90\":%.6f,\"p99\":%.6f,\"max\":%.6f}", name, s->n, s->n ? sum / s->n : 0.0, Q(.5), Q(.9), Q(.99), Q(1));
}

static int64_t cpu_ns(void) {
    int64_t total = 0;
    for (int i = 0; i < opt.pid_n; i++) {
        struct timespec t;
        clockid_t clock = (~(clockid_t)opt.pids[i] << 3) | 2; /* CPUCLOCK_SCHED */
        if (clock_gettime(clock, &t)) { fprintf(stderr, "process %d has gone\n", opt.pids[i]); exit(3); }
        total += t.tv_sec * 1000000000LL + t.tv_nsec;
    }
    return total;
}

static void load_bodies(const char *path) {
    FILE *f = fopen(path, "rb");
    uint32_t n;
    if (!f) die(path);
    while (fread(&n, 4, 1, f) == 1) {
        char *at = malloc(n);
        if (fread(at, 1, n, f) != n) die("bodies file is cut short");
        bodies = realloc(bodies, (body_n + 1) * sizeof *bodies);
        body_t *b = &bodies[body_n++];
        char *mark = memmem(at, n, "################", 16);
        *b = (body_t){.before = at, .before_n = mark ? (size_t)(mark - at) : n};
        if (mark) b->after = mark + 16, b->after_n = n - b->before_n - 16;
        b->head_n = snprintf(b->head, sizeof b->head,
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: bench/1\r\nAccept: */*\r\nAuthorization: Bearer sk-bench\r\n"
            "Content-Type: application/json\r\nContent-Length: %u\r\n\r\n", opt.port, n);
    }
    fclose(f);
    if (!body_n) die("no bodies");
}

static void interest(conn_t *c, uint32_t events, int op) {
    struct epoll_event ev = {.events = events, .data.ptr = c};
    epoll_ctl(ep, op, c->fd, &ev);
}

static void hang_up(conn_t *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    c->busy = false;
    c->state = IDLE;
}

static bool connect_now(conn_t *c) {
    struct sockaddr_in a = loopback(opt.port);
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&a, sizeof a)) { count.connect++; hang_up(c); return false; }
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    nodelay(c->fd);
    c->reused = false;
    count.opened++;
    interest(c, EPOLLIN, EPOLL_CTL_ADD);
    return true;
}

static bool send_rest(conn_t *c) {
    while (c->part_at < c->part_n) {
        ssize_t n = writev(c->fd, c->part + c->part_at, c->part_n - c->part_at);
        if (n < 0 && errno == EAGAIN) { interest(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD); return true; }
        if (n < 0) return false;
        while (c->part_at < c->part_n && (size_t)n >= c->part[c->part_at].iov_len) n -= c->part[c->part_at++].iov_len;
        if (c->part_at < c->part_n) {
            c->part[c->part_at].iov_base = (char *)c->part[c->part_at].iov_base + n;
            c->part[c->part_at].iov_len -= n;
        }
    }
    return true;
}

/* Send a request on this connection, opened if needed; a failure to send counts as an error. */
static void ask(conn_t *c, int64_t intended_ns) {
    if (c->fd < 0 && !connect_now(c)) return;
    body_t *b = &bodies[serial % body_n];
    snprintf(c->unique, sizeof c->unique, "%016llx", (unsigned long long)(serial++ * 0x9E3779B97F4A7C15ULL));
    c->part[0] = (struct iovec){b->head, b->head_n};
    c->part[1] = (struct iovec){(char *)b->before, b->before_n};
    c->part[2] = (struct iovec){c->unique, b->after ? 16 : 0};
    c->part[3] = (struct iovec){(char *)b->after, b->after_n};
    c->part_n = b->after ? 4 : 2;
    c->part_at = 0;
    c->asked_ns = intended_ns;
    c->state = HEAD;
    c->head_n = c->events = c->newlines = c->delay_ns = 0;
    c->busy = true;
    c->first_seen = c->chunked = false;
    if (!send_rest(c)) { count.closed++; hang_up(c); }
}

static void finished(conn_t *c) {
    double took = (now_ns() - c->asked_ns) / 1e9;
    bool bad = c->status != 200;
    if (bad) count.status++, count.bad_status = c->status;
    else if (opt.expected_events && c->events != opt.expected_events) count.mismatch++;
    if (measuring && !bad) {
        count.requests++;
        note(&latency, took);
    }
    c->busy = false;
    c->state = IDLE;
    c->reused = true;
    if (c->close_after) hang_up(c);
    if (stopping) return;
    if (!opt.open) ask(c, now_ns());
    else c->next_idle = idle, idle = c;
}

/* Note how long ago a chunk was written. A stamp that two reads divide is left out. */
static void note_delays(conn_t *c, const char *p, size_t n) {
    int64_t now = now_ns();
    for (const char *end = p + n; (p = memmem(p, end - p, STAMP, strlen(STAMP)));) {
        p += strlen(STAMP);
        if (end - p <= STAMP_DIGITS) return;
        int64_t took = now - strtoll(p, NULL, 10);
        if (measuring) note(&delay, took / 1e9);
        if (measuring && c->delay_ns) note(&gap, (took - c->delay_ns) / 1e9);
        c->delay_ns = took;
    }
}

/* Count server-sent events, which end with an empty line. The first with generated text is the first
 * token; an event with the role precedes it. */
static void count_events(conn_t *c, const char *p, size_t n) {
    long before = c->events;
    if (opt.stamped) note_delays(c, p, n);
    if (!c->first_seen && memmem(p, n, "\"content\":\" ", 12)) {
        c->first_seen = true;
        if (measuring) note(&ttft, (now_ns() - c->asked_ns) / 1e9);
    }
    for (const char *end = p + n; p < end; p++) {
        if (*p != '\n') {
            c->newlines = 0;
            p = memchr(p, '\n', end - p);
            if (!p) break;
        }
        if (++c->newlines == 2) c->events++, c->newlines = 0;
    }
    if (measuring) count.events += c->events - before;
}

static bool read_head(conn_t *c, const char **p, const char *end) {
    size_t n = end - *p, had = c->head_n;
    if (n > sizeof c->head - had) n = sizeof c->head - had;
    memcpy(c->head + had, *p, n);
    c->head_n += n;
    char *stop = memmem(c->head, c->head_n, "\r\n\r\n", 4);
    if (!stop) { *p += n; return c->head_n < sizeof c->head; }
    stop += 4;
    *p += stop - c->head - had;
    const char *length = header(c->head, stop, "content-length:"), *closing = header(c->head, stop, "connection:");
    c->status = atoi(c->head + 9);
    c->chunked = header(c->head, stop, "transfer-encoding:") != NULL;
    c->close_after = closing && strncasecmp(closing, "close", 5) == 0;
    c->left = c->chunked ? 0 : length ? atol(length) : -1;
    c->state = c->chunked ? CHUNK_SIZE : LENGTH;
    if (!c->chunked && c->left == 0) finished(c);
    return c->chunked || c->left >= 0;
}

static void take_data(conn_t *c, const char **p, const char *end) {
    long n = end - *p < c->left ? end - *p : c->left;
    if (measuring) count.bytes += n;
    if (c->chunked) count_events(c, *p, n);
    *p += n;
    c->left -= n;
    if (c->left) return;
    if (c->chunked) c->state = CHUNK_END;
    else finished(c);
}

static int digit(char ch) { return ch <= '9' ? ch - '0' : (ch | 32) - 'a' + 10; }

/* Parse received bytes; returns false if they are not an HTTP/1.1 answer. */
static bool feed(conn_t *c, const char *p, size_t n) {
    for (const char *end = p + n; p < end;) {
        switch (c->state) {
        case HEAD: if (!read_head(c, &p, end)) return false; break;
        case LENGTH: case CHUNK_DATA: take_data(c, &p, end); break;
        case CHUNK_SIZE:
            if (*p == '\n') c->state = c->left ? CHUNK_DATA : TRAILER;
            else if (*p != '\r') c->left = c->left * 16 + digit(*p);
            p++;
            break;
        case CHUNK_END: if (*p++ == '\n') c->state = CHUNK_SIZE, c->left = 0; break;
        case TRAILER: if (*p++ == '\n') { finished(c); } break;
        case IDLE: return false;
        }
    }
    return true;
}

static void on_event(conn_t *c, uint32_t events) {
    static char buffer[1 << 17];
    if (c->fd < 0) return;
    if (events & EPOLLOUT) {
        if (!send_rest(c)) { count.closed++; hang_up(c); return; }
        if (c->part_at == c->part_n) interest(c, EPOLLIN, EPOLL_CTL_MOD);
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t n = recv(c->fd, buffer, sizeof buffer, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n > 0 && feed(c, buffer, n)) return;
    bool stale = n <= 0 && c->reused && c->state == HEAD && c->head_n == 0, was_busy = c->busy;
    if (n > 0) count.framing++;
    else if (was_busy && !stale) count.closed++;
    hang_up(c);
    if (was_busy && !stopping && !opt.open) ask(c, stale ? c->asked_ns : now_ns());
    else if (was_busy && stale && !stopping) ask(c, c->asked_ns);
}

static conn_t *fresh(void) {
    conn_t *c = calloc(1, sizeof *c);
    c->fd = -1;
    return c;
}

static double uniform(void) {
    static uint64_t x = 0x9E3779B97F4A7C15ULL;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return ((x >> 11) + 1) / 9007199254740993.0;
}

static double neg_log(double u) { /* -ln(u) by halving into [0.5, 1]: no libm for one call */
    double sum = 0, y;
    while (u < 0.5) u *= 2, sum += 0.6931471805599453;
    y = (1 - u) / (1 + u);
    double y2 = y * y;
    return sum + 2 * y * (1 + y2 * (1 / 3. + y2 * (1 / 5. + y2 * (1 / 7. + y2 * (1 / 9. + y2 / 11.)))));
}

static void ask_on_any(int64_t intended_ns) {
    conn_t *c = idle;
    if (c) idle = c->next_idle;
    else c = fresh();
    if (now_ns() - intended_ns > 1000000) count.late++;
    ask(c, intended_ns);
}

static void parse(int argc, char **argv, const char **path) {
    for (int i = 1; i < argc; i += 2) {
        const char *name = argv[i], *v = argv[i + 1];
        if (!v) { fprintf(stderr, "usage: see the head of bench/load.c\n"); exit(2); }
        if (!strcmp(name, "--port")) opt.port = atoi(v);
        else if (!strcmp(name, "--bodies")) *path = v;
        else if (!strcmp(name, "--mode")) opt.open = !strcmp(v, "open");
        else if (!strcmp(name, "--connections")) opt.connections = atoi(v);
        else if (!strcmp(name, "--rate")) opt.rate = atof(v);
        else if (!strcmp(name, "--warmup-ms")) opt.warmup_ms = atoi(v);
        else if (!strcmp(name, "--window-ms")) opt.window_ms = atoi(v);
        else if (!strcmp(name, "--ramp-ms")) opt.ramp_ms = atoi(v);
        else if (!strcmp(name, "--stamped")) opt.stamped = atoi(v);
        else if (!strcmp(name, "--events-per-stream")) opt.expected_events = atol(v);
        else if (!strcmp(name, "--cpu-pids"))
            for (const char *p = v; *p && opt.pid_n < 256; p += strcspn(p, ","), p += *p == ',') opt.pids[opt.pid_n++] = atoi(p);
        else { fprintf(stderr, "unknown option %s\n", name); exit(2); }
    }
}

static int streaming(conn_t **held) {
    int n = 0;
    for (int i = 0; i < opt.connections; i++) n += held[i]->busy && held[i]->state > LENGTH;
    return n;
}

int main(int argc, char **argv) {
    const char *path = NULL;
    parse(argc, argv, &path);
    if (!path) { fprintf(stderr, "--bodies FILE is needed\n"); return 2; }
    sharp_process();
    load_bodies(path);
    ep = epoll_create1(EPOLL_CLOEXEC);
    conn_t **held = calloc(opt.connections, sizeof *held);
    for (int i = 0; i < opt.connections; i++) held[i] = fresh();

    int64_t start = now_ns(), begin = start + (opt.ramp_ms + opt.warmup_ms) * 1000000LL, end = begin + opt.window_ms * 1000000LL;
    int64_t next = start, cpu = 0, window = 0;
    int asked = 0, streaming_first = 0;
    for (struct epoll_event ev[256];;) {
        int64_t now = now_ns(), until = end;
        if (!measuring && now >= begin) measuring = true, streaming_first = streaming(held), cpu = cpu_ns(), window = now;
        if (now >= end) break;
        if (!measuring) until = begin;
        while (opt.open && next <= now) ask_on_any(next), next += (int64_t)(neg_log(uniform()) * 1e9 / opt.rate);
        for (; !opt.open && asked < opt.connections && next <= now; asked++, next += opt.ramp_ms * 1000000LL / opt.connections) ask(held[asked], now);
        if ((opt.open || asked < opt.connections) && next < until) until = next;
        int n = wait_events(ep, ev, 256, until);
        for (int i = 0; i < n; i++) on_event(ev[i].data.ptr, ev[i].events);
    }
    cpu = cpu_ns() - cpu;
    window = now_ns() - window;
    stopping = true;
    printf("{\"window_s\":%.6f,\"cpu_s\":%.9f,\"requests\":%ld,\"events\":%ld,\"bytes\":%lld,\"connections_opened\":%ld,\"late\":%ld,"
           "\"errors\":{\"connect\":%ld,\"status\":%ld,\"framing\":%ld,\"closed\":%ld,\"event_count\":%ld},\"bad_status\":%d,\"streaming\":[%d,%d]",
           window / 1e9, cpu / 1e9, count.requests, count.events, (long long)count.bytes, count.opened, count.late,
           count.connect, count.status, count.framing, count.closed, count.mismatch, count.bad_status, streaming_first, streaming(held));
    print_samples("latency_s", &latency);
    print_samples("ttft_s", &ttft);
    if (opt.stamped) print_samples("delay_s", &delay), print_samples("gap_s", &gap);
    puts("}");
    return 0;
}
