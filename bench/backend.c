/* A static OpenAI-compatible HTTP/1.1 server: canned answers on several ports by one epoll loop.
 *
 * It replaces TP groups in measurements of gateways, so it does as little as possible and parses no
 * JSON. A body with "stream":true gets server-sent events in HTTP chunks. A body that requests a remote
 * decode gets vLLM's answer to a prefill over NIXL. Any other POST gets a small chat completion.
 *
 * The pace of a stream is set on the command line, or per request by a note in the prompt, which every
 * gateway forwards, unlike unknown fields and headers:
 *     @bench chunks=300 every_us=10000 first_us=5000 burst=1 join=0 stamp=0@
 * burst: chunks per beat; join=1 sends the chunks of a beat in one write, join=0 in separate ones.
 * stamp=1: each chunk contains the time at which it is written, for the load generator's --stamped.
 *
 *     backend --port 19000 --ports 4 [--chunks N] [--every-us D] [--first-us F] [--burst B] [--join 0|1]
 */
#include "wire.h"

typedef struct {
    int chunks, every_us, first_us, burst, join, stamp;
} pace_t;

typedef struct {
    int fd, heap_at; /* heap_at: place in the timer heap, -1 when absent */
    bytes_t in, out;
    size_t sent;
    bool streaming, wants_usage, begun;
    int left;
    pace_t pace;
    int64_t due_ns;
} conn_t;

static int ep;
static pace_t default_pace = {.chunks = 8, .every_us = 10000, .first_us = 5000, .burst = 1, .join = 0};
static conn_t **heap;
static int heap_n, heap_cap;

/* ---- canned bytes ---- */
#define CHUNK_HEAD "{\"id\":\"chatcmpl-bench0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":\"bench-model\",\"choices\":"
#define USAGE "\"usage\":{\"prompt_tokens\":128,\"total_tokens\":192,\"completion_tokens\":64,\"prompt_tokens_details\":null}"
static bytes_t role_chunk, token_chunk, stamped_chunk, finish_chunk, usage_chunk, done_chunk, stream_head, answer, prefilled;

static bytes_t frame(const char *event) {
    bytes_t b = {0};
    char size[32];
    put(&b, size, snprintf(size, sizeof size, "%zx\r\n", strlen(event)));
    put(&b, event, strlen(event));
    put(&b, "\r\n", 2);
    return b;
}

static bytes_t with_length(const char *type, const char *body) {
    bytes_t b = {0};
    char head[256];
    put(&b, head, snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: %zu\r\ncontent-type: %s\r\n\r\n", strlen(body), type));
    put(&b, body, strlen(body));
    return b;
}

static void make_canned(void) {
    role_chunk = frame("data: " CHUNK_HEAD "[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n");
    token_chunk = frame("data: " CHUNK_HEAD "[{\"index\":0,\"delta\":{\"content\":\" water\"},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}\n\n");
    stamped_chunk = frame("data: " CHUNK_HEAD "[{\"index\":0,\"delta\":{\"content\":\" water\"},\"logprobs\":null,\"finish_reason\":null," STAMP "0000000000000000000\"}]}\n\n");
    finish_chunk = frame("data: " CHUNK_HEAD "[{\"index\":0,\"delta\":{\"content\":\"\"},\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}]}\n\n");
    usage_chunk = frame("data: " CHUNK_HEAD "[]," USAGE "}\n\n");
    done_chunk = frame("data: [DONE]\n\n");
    put(&done_chunk, "0\r\n\r\n", 5);
    const char *head = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    put(&stream_head, head, strlen(head));
    answer = with_length("application/json",
        "{\"id\":\"chatcmpl-bench0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"bench-model\",\"choices\":[{\"index\":0,"
        "\"message\":{\"role\":\"assistant\",\"content\":\"A penstock carries the water to the wheel.\",\"refusal\":null,\"tool_calls\":[]},"
        "\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}]," USAGE "}");
    prefilled = with_length("application/json",
        "{\"id\":\"chatcmpl-bench0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"bench-model\",\"choices\":[{\"index\":0,"
        "\"message\":{\"role\":\"assistant\",\"content\":\"A\",\"refusal\":null,\"tool_calls\":[]},"
        "\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}]," USAGE ","
        "\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_block_ids\":[[7,8,9,10,11,12,13,14]],"
        "\"remote_engine_id\":\"3f1c0e5a-bench\",\"remote_request_id\":\"chatcmpl-bench0123456789abcdef\",\"remote_host\":\"127.0.0.1\","
        "\"remote_port\":5600,\"tp_size\":4,\"remote_num_tokens\":128,\"remote_prefill_cached_tokens\":0}}");
}

static const struct { const char *path, *type, *body; } pages[] = {
    {"/health", "text/plain", ""},
    {"/health_generate", "text/plain", ""},
    {"/version", "application/json", "{\"version\":\"0.11.0\"}"},
    {"/v1/models", "application/json", "{\"object\":\"list\",\"data\":[{\"id\":\"bench-model\",\"object\":\"model\",\"created\":1760000000,\"owned_by\":\"vllm\",\"root\":\"bench-model\",\"parent\":null,\"max_model_len\":262144},{\"id\":\"bench-split\",\"object\":\"model\"}]}"},
    {"/get_model_info", "application/json", "{\"model_path\":\"bench-model\",\"tokenizer_path\":\"\",\"is_generation\":true,\"preferred_sampling_params\":null}"},
    {"/model_info", "application/json", "{\"model_path\":\"bench-model\",\"tokenizer_path\":\"\",\"is_generation\":true,\"preferred_sampling_params\":null}"},
    {"/get_server_info", "application/json", "{\"model_path\":\"bench-model\",\"served_model_name\":\"bench-model\",\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5.3\",\"internal_states\":[{}]}"},
    {"/server_info", "application/json", "{\"model_path\":\"bench-model\",\"served_model_name\":\"bench-model\",\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5.3\",\"internal_states\":[{}]}"},
    {"/get_load", "application/json", "[{\"dp_rank\":0,\"num_reqs\":0,\"num_waiting_reqs\":0,\"num_tokens\":0}]"},
    {"/metrics", "text/plain; version=0.0.4",
     "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\",model_name=\"bench-model\"} 0.0\n"
     "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine=\"0\",model_name=\"bench-model\"} 0.0\n"
     "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine=\"0\",model_name=\"bench-model\"} 0.0\n"},
};

/* ---- timers: a binary heap of streaming connections ---- */
static void place(int i, conn_t *c) { heap[i] = c; c->heap_at = i; }

static void sift_up(int i) {
    conn_t *c = heap[i];
    for (; i > 0 && heap[(i - 1) / 2]->due_ns > c->due_ns; i = (i - 1) / 2) place(i, heap[(i - 1) / 2]);
    place(i, c);
}

static void sift_down(int i) {
    conn_t *c = heap[i];
    for (int k; (k = 2 * i + 1) < heap_n; i = k) {
        if (k + 1 < heap_n && heap[k + 1]->due_ns < heap[k]->due_ns) k++;
        if (heap[k]->due_ns >= c->due_ns) break;
        place(i, heap[k]);
    }
    place(i, c);
}

static void schedule(conn_t *c) {
    if (heap_n == heap_cap) heap = realloc(heap, (heap_cap = heap_cap ? heap_cap * 2 : 1024) * sizeof *heap);
    place(heap_n, c);
    sift_up(heap_n++);
}

static void unschedule(conn_t *c) {
    int i = c->heap_at;
    if (i < 0) return;
    c->heap_at = -1;
    conn_t *last = heap[--heap_n];
    if (last == c) return;
    place(i, last);
    sift_up(i);
    sift_down(last->heap_at);
}

/* ---- connections ---- */
static void drop(conn_t *c) {
    unschedule(c);
    close(c->fd);
    free(c->in.at);
    free(c->out.at);
    free(c);
}

static void watch(conn_t *c, uint32_t events) {
    struct epoll_event ev = {.events = events, .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &ev);
}

/* Send what the socket accepts and keep the remainder. Returns false when the peer has closed; the
 * caller then drops the connection. */
static bool flush_out(conn_t *c) {
    while (c->sent < c->out.len) {
        ssize_t n = send(c->fd, c->out.at + c->sent, c->out.len - c->sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) { watch(c, EPOLLIN | EPOLLOUT); return true; }
        if (n < 0) return false;
        c->sent += n;
    }
    c->sent = c->out.len = 0;
    return true;
}

static bool say(conn_t *c, const bytes_t *b) { put(&c->out, b->at, b->len); return flush_out(c); }

/* Append a chunk with the present time in nanoseconds. */
static void put_stamped(bytes_t *out) {
    size_t at = (char *)memmem(stamped_chunk.at, stamped_chunk.len, STAMP, strlen(STAMP)) - stamped_chunk.at + strlen(STAMP);
    char *digit = stamped_chunk.at + at + STAMP_DIGITS;
    for (int64_t rest = now_ns(); digit > stamped_chunk.at + at; rest /= 10) *--digit = '0' + rest % 10;
    put(out, stamped_chunk.at, stamped_chunk.len);
}

/* Send one beat of a stream. The first has the role, the last has finish, usage and [DONE]. */
static bool beat(conn_t *c) {
    if (!c->begun) put(&c->out, role_chunk.at, role_chunk.len);
    c->begun = true;
    for (int i = 0; i < c->pace.burst && c->left > 0; i++, c->left--) {
        if (c->pace.stamp) put_stamped(&c->out);
        else put(&c->out, token_chunk.at, token_chunk.len);
        if (!c->pace.join && !flush_out(c)) return false;
    }
    if (c->left > 0) {
        c->due_ns += c->pace.every_us * 1000LL;
        schedule(c);
        return flush_out(c);
    }
    put(&c->out, finish_chunk.at, finish_chunk.len);
    if (c->wants_usage) put(&c->out, usage_chunk.at, usage_chunk.len);
    put(&c->out, done_chunk.at, done_chunk.len);
    c->streaming = false;
    return flush_out(c);
}

static int field(const char *note, const char *name, int otherwise) {
    const char *at = strstr(note, name);
    return at ? atoi(at + strlen(name)) : otherwise;
}

static pace_t pace_of(const char *body, size_t n) {
    char note[160] = "";
    const char *at = memmem(body, n, "@bench ", 7);
    if (!at) return default_pace;
    size_t most = body + n - at;
    memcpy(note, at, most < sizeof note - 1 ? most : sizeof note - 1);
    char *stop = strchr(note + 1, '@');
    if (stop) *stop = 0;
    pace_t p = default_pace;
    p.chunks = field(note, "chunks=", p.chunks);
    p.every_us = field(note, "every_us=", p.every_us);
    p.first_us = field(note, "first_us=", p.first_us);
    p.burst = field(note, "burst=", p.burst);
    p.join = field(note, "join=", p.join);
    p.stamp = field(note, "stamp=", p.stamp);
    return p;
}

static bool is_true(const char *body, size_t n, const char *name) {
    const char *at = memmem(body, n, name, strlen(name));
    if (!at) return false;
    for (at += strlen(name); at < body + n && (*at == ' ' || *at == ':'); at++) {}
    return at + 4 <= body + n && memcmp(at, "true", 4) == 0;
}

static bool answer_post(conn_t *c, const char *body, size_t n) {
    if (is_true(body, n, "\"do_remote_decode\"")) return say(c, &prefilled);
    if (!is_true(body, n, "\"stream\"")) return say(c, &answer);
    c->pace = pace_of(body, n);
    c->wants_usage = is_true(body, n, "\"include_usage\"");
    c->left = c->pace.chunks;
    c->streaming = true;
    c->begun = false;
    c->due_ns = now_ns() + c->pace.first_us * 1000LL;
    schedule(c);
    return say(c, &stream_head);
}

static bool answer_get(conn_t *c, const char *path) {
    for (size_t i = 0; i < sizeof pages / sizeof *pages; i++) {
        size_t n = strlen(pages[i].path);
        if (strncmp(path, pages[i].path, n) || (path[n] != ' ' && path[n] != '?')) continue;
        bytes_t page = with_length(pages[i].type, pages[i].body);
        bool fine = say(c, &page);
        free(page.at);
        return fine;
    }
    static const char none[] = "HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}";
    put(&c->out, none, sizeof none - 1);
    return flush_out(c);
}

/* Answer every complete request in the buffer; returns false when the connection must be closed. */
static bool serve_buffer(conn_t *c) {
    while (c->in.len && !c->streaming) {
        char *end = memmem(c->in.at, c->in.len, "\r\n\r\n", 4);
        if (!end) return c->in.len < 65536;
        end += 4;
        const char *length = header(c->in.at, end, "content-length:");
        /* No measured gateway sends chunked requests. */
        if (header(c->in.at, end, "transfer-encoding:")) return false;
        size_t body = length ? strtoull(length, NULL, 10) : 0, head = end - c->in.at;
        if (c->in.len < head + body) return room(&c->in, head + body - c->in.len), true;
        bool post = memcmp(c->in.at, "POST ", 5) == 0;
        /* sglang-router first tries gRPC, which begins with the HTTP/2 preface. */
        if (!post && memcmp(c->in.at, "GET ", 4)) return false;
        if (!(post ? answer_post(c, end, body) : answer_get(c, c->in.at + 4))) return false;
        memmove(c->in.at, c->in.at + head + body, c->in.len - head - body);
        c->in.len -= head + body;
    }
    return true;
}

static bool on_readable(conn_t *c) {
    for (;;) {
        room(&c->in, 16384);
        size_t space = c->in.cap - c->in.len;
        ssize_t n = recv(c->fd, c->in.at + c->in.len, space, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN)) return false;
        if (n > 0) c->in.len += n;
        if (n < 0 || (size_t)n < space) break;
    }
    return serve_buffer(c);
}

static void accept_all(int listener) {
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        nodelay(fd);
        conn_t *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->heap_at = -1;
        struct epoll_event ev = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev);
    }
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in a = loopback(port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 4096)) die("listen");
    return fd;
}

static void beat_all_due(void) {
    for (int64_t now = now_ns(); heap_n && heap[0]->due_ns <= now;) {
        conn_t *c = heap[0];
        unschedule(c);
        if (!beat(c) || (!c->streaming && !serve_buffer(c))) drop(c);
    }
}

int main(int argc, char **argv) {
    int port = 19000, ports = 1;
    for (int i = 1; i < argc; i += 2) {
        int v = i + 1 < argc ? atoi(argv[i + 1]) : 0;
        if (i + 1 == argc) { fprintf(stderr, "usage: see the head of bench/backend.c\n"); return 2; }
        if (!strcmp(argv[i], "--port")) port = v;
        else if (!strcmp(argv[i], "--ports")) ports = v;
        else if (!strcmp(argv[i], "--chunks")) default_pace.chunks = v;
        else if (!strcmp(argv[i], "--every-us")) default_pace.every_us = v;
        else if (!strcmp(argv[i], "--first-us")) default_pace.first_us = v;
        else if (!strcmp(argv[i], "--burst")) default_pace.burst = v;
        else if (!strcmp(argv[i], "--join")) default_pace.join = v;
        else { fprintf(stderr, "unknown option %s\n", argv[i]); return 2; }
    }
    sharp_process();
    make_canned();
    ep = epoll_create1(EPOLL_CLOEXEC);
    conn_t *listeners = calloc(ports, sizeof *listeners);
    for (int i = 0; i < ports; i++) {
        listeners[i].fd = listen_on(port + i);
        struct epoll_event ev = {.events = EPOLLIN, .data.ptr = &listeners[i]};
        epoll_ctl(ep, EPOLL_CTL_ADD, listeners[i].fd, &ev);
    }
    puts("ready");
    fflush(stdout);
    for (struct epoll_event ev[256];;) {
        int n = wait_events(ep, ev, 256, heap_n ? heap[0]->due_ns : -1);
        for (int i = 0; i < n; i++) {
            conn_t *c = ev[i].data.ptr;
            if (c >= listeners && c < listeners + ports) { accept_all(c->fd); continue; }
            bool fine = true;
            if (ev[i].events & EPOLLOUT && (fine = flush_out(c)) && !c->out.len) watch(c, EPOLLIN);
            if (fine && ev[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) fine = on_readable(c);
            if (!fine) drop(c);
        }
        beat_all_due();
    }
}
