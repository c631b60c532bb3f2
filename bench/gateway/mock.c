/* A mock engine for the gateway's benchmark: answers chats without work, on every loopback address.
 *
 * usage: mock PORT
 *
 * It listens on all of 127.0.0.0/8 with one socket, so that one process stands for any number of
 * upstreams. A body that holds "stream":true is answered by 32 events and [DONE]; with "paced" in it
 * the events leave 10 ms apart, otherwise all of them in one write. GET is answered by 200, since
 * routers look at an engine's health and models before they use it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { READ_BYTES = 16384, EVENTS = 32, PACE_NS = 10 * 1000 * 1000, MOST_FDS = 65536 };

typedef struct Connection {
    int fd;
    int held;             /* bytes of a request that is not whole yet */
    int events_left;      /* of a paced stream */
    int64_t due_ns;
    struct Connection *next; /* in the line of paced streams: all wait equally long, so it is in order */
    char data[READ_BYTES];
} Connection;

static Connection *connections[MOST_FDS];
static Connection *line_first, *line_last;
static char plain[1024], burst[16384], models[1024], event_chunk[512], stream_head[256], stream_end[256];
static int plain_bytes, burst_bytes, models_bytes, event_bytes, head_bytes, end_bytes;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int chunk_of(char *out, const char *text) { return sprintf(out, "%zx\r\n%s\r\n", strlen(text), text); }

static int json_answer(char *out, const char *body) {
    return sprintf(out, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                   strlen(body), body);
}

static void prepare_answers(void) {
    plain_bytes = json_answer(plain,
        "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,"
        "\"message\":{\"role\":\"assistant\",\"content\":\"The answer is forty-two.\"},\"finish_reason\":\"stop\"}],"
        "\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":6,\"total_tokens\":18}}");
    models_bytes = json_answer(models,
        "{\"status\":\"ok\",\"object\":\"list\",\"model_path\":\"m\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1,"
        "\"owned_by\":\"mock\"}]}");
    head_bytes = sprintf(stream_head, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                      "transfer-encoding: chunked\r\n\r\n");
    event_bytes = chunk_of(event_chunk,
        "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":"
        "[{\"index\":0,\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}\n\n");
    end_bytes = chunk_of(stream_end, "data: [DONE]\n\n");
    end_bytes += sprintf(stream_end + end_bytes, "0\r\n\r\n");
    memcpy(burst, stream_head, head_bytes);
    burst_bytes = head_bytes;
    for (int i = 0; i < EVENTS; i++, burst_bytes += event_bytes) memcpy(burst + burst_bytes, event_chunk, event_bytes);
    memcpy(burst + burst_bytes, stream_end, end_bytes);
    burst_bytes += end_bytes;
}

static void drop(Connection *c) {
    for (Connection **p = &line_first, *before = NULL; *p; before = *p, p = &(*p)->next)
        if (*p == c) {
            *p = c->next;
            if (line_last == c) line_last = before;
            break;
        }
    connections[c->fd] = NULL;
    close(c->fd);
    free(c);
}

/* Answers are far smaller than a socket's buffer: one that does not fit means a peer that reads nothing. */
static int send_all(Connection *c, const char *data, int bytes) {
    return send(c->fd, data, bytes, MSG_NOSIGNAL) == bytes;
}

static void wait_in_line(Connection *c, int64_t now) {
    c->due_ns = now + PACE_NS;
    c->next = NULL;
    if (line_last) line_last->next = c; else line_first = c;
    line_last = c;
}

static int send_event(Connection *c, int64_t now) {
    c->events_left--;
    if (!send_all(c, event_chunk, event_bytes)) return 0;
    if (c->events_left) wait_in_line(c, now);
    else return send_all(c, stream_end, end_bytes);
    return 1;
}

static int begin_paced(Connection *c) {
    char first[1024];
    memcpy(first, stream_head, head_bytes);
    memcpy(first + head_bytes, event_chunk, event_bytes);
    c->events_left = EVENTS - 1;
    wait_in_line(c, now_ns());
    return send_all(c, first, head_bytes + event_bytes);
}

static int answer(Connection *c, const char *body, int bytes) {
    if (c->data[0] == 'G') return send_all(c, models, models_bytes);
    if (!memmem(body, bytes, "\"stream\":true", 13)) return send_all(c, plain, plain_bytes);
    return memmem(body, bytes, "paced", 5) ? begin_paced(c) : send_all(c, burst, burst_bytes);
}

/* Length of the request's body in `data`, -1 if it is not all there; chunked bodies are looked through. */
static int body_length(const char *head, const char *body, const char *end) {
    const char *length = strcasestr(head, "\ncontent-length:");
    if (length && length < body) {
        int bytes = atoi(length + 16);
        return end - body >= bytes ? bytes : -1;
    }
    const char *coding = strcasestr(head, "\ntransfer-encoding:");
    if (!coding || coding >= body) return 0;
    const char *last = memmem(body, end - body, "\r\n0\r\n\r\n", 7);
    return last ? (int)(last - body) + 7 : -1;
}

static int take_requests(Connection *c) {
    for (;;) {
        c->data[c->held] = 0;
        char *blank = memmem(c->data, c->held, "\r\n\r\n", 4);
        if (!blank) return c->held < READ_BYTES - 1;
        char *body = blank + 4;
        int bytes = body_length(c->data, body, c->data + c->held);
        if (bytes < 0) return c->held < READ_BYTES - 1;
        if (!answer(c, body, bytes)) return 0;
        int used = body - c->data + bytes;
        c->held -= used;
        memmove(c->data, c->data + used, c->held);
        if (!c->held) return 1;
    }
}

static void serve(Connection *c) {
    int bytes = recv(c->fd, c->data + c->held, READ_BYTES - 1 - c->held, 0);
    if (bytes < 0 && errno == EAGAIN) return;
    if (bytes > 0) {
        c->held += bytes;
        if (take_requests(c)) return;
    }
    drop(c);
}

static void welcome(int server, int poll) {
    for (int fd; (fd = accept4(server, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        int on = 1;
        if (fd >= MOST_FDS) { close(fd); continue; }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        Connection *c = connections[fd] = calloc(1, sizeof *c);
        c->fd = fd;
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
    }
}

static void send_due_events(void) {
    int64_t now = now_ns();
    while (line_first && line_first->due_ns <= now) {
        Connection *c = line_first;
        line_first = c->next;
        if (!line_first) line_last = NULL;
        if (!send_event(c, now)) drop(c);
    }
}

static int listen_on(int port) {
    int server = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(server, (struct sockaddr *)&address, sizeof address) || listen(server, 4096)) {
        perror("mock");
        exit(1);
    }
    return server;
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    struct rlimit limit = {MOST_FDS, MOST_FDS};
    setrlimit(RLIMIT_NOFILE, &limit);
    prepare_answers();
    int server = listen_on(atoi(arguments[1])), poll = epoll_create1(0);
    struct epoll_event events[256], listening = {.events = EPOLLIN, .data.fd = server};
    epoll_ctl(poll, EPOLL_CTL_ADD, server, &listening);
    for (;;) {
        int ready = epoll_wait(poll, events, 256, line_first ? 1 : -1);
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd == server) welcome(server, poll);
            else if (connections[fd]) serve(connections[fd]);
        }
        if (line_first) send_due_events();
    }
}
