/* A closed-loop HTTP client for the gateway's benchmark.
 *
 * usage: load PORT CONNECTIONS SECONDS SESSIONS BODY KEY
 *
 * Each connection is kept alive and sends its next request when the last answer is whole. Requests
 * carry one of SESSIONS session ids in turn. Prints one line: all requests, then of those after the
 * first fifth of the time: requests, failed (a status other than 200, or a connection that broke),
 * microseconds, and p50 and p99 of the first byte of the body and of the whole answer in microseconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { READ_BYTES = 65536, HEAD_BYTES = 8192, SLOTS = 1 << 21 };
enum { IN_HEAD, IN_BODY, IN_SIZE, IN_CHUNK, IN_LAST };

typedef struct {
    int fd, state, head_bytes, status, is_chunked, line_bytes;
    long left;            /* bytes of the body, or of the chunk with its line end */
    int64_t sent_ns, first_ns;
    char head[HEAD_BYTES], line[32];
} Connection;

typedef struct { uint32_t *slots; long count; } Histogram; /* one slot for each microsecond */

static struct sockaddr_in target;
static char **requests;
static int *request_bytes, sessions, poll_fd;
static long next_session, all_done, done, failed;
static int is_counting;
static Histogram first, whole;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void note(Histogram *h, int64_t ns) {
    int64_t slot = ns / 1000;
    h->slots[slot < SLOTS ? slot : SLOTS - 1]++;
    h->count++;
}

static long quantile(const Histogram *h, double share) {
    long rank = share * (h->count - 1), seen = 0;
    for (long slot = 0; slot < SLOTS; slot++)
        if ((seen += h->slots[slot]) > rank) return slot;
    return 0;
}

static void make_requests(const char *body, const char *key) {
    requests = calloc(sessions, sizeof *requests);
    request_bytes = calloc(sessions, sizeof *request_bytes);
    for (int i = 0; i < sessions; i++)
        request_bytes[i] = asprintf(&requests[i],
            "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nuser-agent: load/1\r\naccept: */*\r\n"
            "content-type: application/json\r\nauthorization: Bearer %s\r\nx-session-id: session-%08d\r\n"
            "content-length: %zu\r\n\r\n%s", key, i, strlen(body), body);
}

static void send_next(Connection *c) {
    int i = next_session++ % sessions;
    c->state = IN_HEAD;
    c->head_bytes = 0;
    c->first_ns = 0;
    c->sent_ns = now_ns();
    if (send(c->fd, requests[i], request_bytes[i], MSG_NOSIGNAL) != request_bytes[i]) failed += is_counting;
}

static void open_connection(Connection *c) {
    int on = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c->fd, (struct sockaddr *)&target, sizeof target)) {
        perror("load");
        exit(1);
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, c->fd, &event);
    send_next(c);
}

static void begin_again(Connection *c) {
    close(c->fd);
    open_connection(c);
}

static void finish(Connection *c) {
    all_done++;
    if (is_counting) {
        int64_t now = now_ns();
        done++;
        failed += c->status != 200;
        note(&first, c->first_ns - c->sent_ns);
        note(&whole, now - c->sent_ns);
    }
    send_next(c);
}

/* Returns where the body starts in what was read, or -1 while the head is not whole. */
static int read_head(Connection *c, const char *data, int bytes) {
    int kept = c->head_bytes;
    int room = HEAD_BYTES - 1 - kept, taken = bytes < room ? bytes : room;
    memcpy(c->head + kept, data, taken);
    c->head_bytes += taken;
    c->head[c->head_bytes] = 0;
    char *blank = strstr(c->head, "\r\n\r\n");
    if (!blank) return -1;
    blank[2] = 0;
    c->status = atoi(c->head + 9);
    char *length = strcasestr(c->head, "\ncontent-length:");
    c->is_chunked = !length;
    c->left = length ? atol(length + 16) : 0;
    c->state = length ? IN_BODY : IN_SIZE;
    c->line_bytes = 0;
    return blank + 4 - c->head - kept;
}

/* Takes one piece of a body; returns how many bytes it used. Sets `left` to -1 at the end. */
static int read_piece(Connection *c, const char *data, int bytes) {
    if (c->state == IN_BODY || c->state == IN_CHUNK) {
        int taken = bytes < c->left ? bytes : c->left;
        c->left -= taken;
        if (!c->left) {
            if (c->state == IN_BODY) c->left = -1;
            else c->state = IN_SIZE, c->line_bytes = 0;
        }
        return taken;
    }
    char byte = data[0]; /* IN_SIZE or IN_LAST: a line, byte by byte */
    if (byte != '\n') {
        if (byte != '\r' && c->line_bytes < 31) c->line[c->line_bytes++] = byte;
        return 1;
    }
    c->line[c->line_bytes] = 0;
    if (c->state == IN_LAST) {
        if (!c->line_bytes) c->left = -1;
    } else {
        long size = strtol(c->line, NULL, 16);
        c->left = size + 2;
        c->state = size ? IN_CHUNK : IN_LAST;
    }
    c->line_bytes = 0;
    return 1;
}

static void take(Connection *c, const char *data, int bytes) {
    int at = 0;
    if (c->state == IN_HEAD) {
        at = read_head(c, data, bytes);
        if (at < 0) return;
        if (c->state == IN_BODY && !c->left) c->left = -1;
    }
    if (at < bytes && !c->first_ns) c->first_ns = now_ns();
    while (at < bytes && c->left >= 0) at += read_piece(c, data + at, bytes - at);
    if (c->left < 0) finish(c);
}

static void run(double seconds) {
    static char data[READ_BYTES];
    struct epoll_event events[512];
    int64_t began = now_ns(), counted = began + seconds * 0.2e9, end = began + seconds * 1e9, now;
    while ((now = now_ns()) < end) {
        if (!is_counting && now >= counted) { is_counting = 1; counted = now; }
        int ready = epoll_wait(poll_fd, events, 512, 50);
        for (int i = 0; i < ready; i++) {
            Connection *c = events[i].data.ptr;
            int bytes = recv(c->fd, data, READ_BYTES, 0);
            if (bytes > 0) take(c, data, bytes);
            else { failed += is_counting; begin_again(c); }
        }
    }
    printf("%ld %ld %ld %ld %ld %ld %ld %ld\n", all_done, done, failed, (long)((now - counted) / 1000),
           quantile(&first, 0.5), quantile(&first, 0.99), quantile(&whole, 0.5), quantile(&whole, 0.99));
}

int main(int count, char **arguments) {
    if (count != 7) return 2;
    int connections = atoi(arguments[2]);
    target = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(atoi(arguments[1]))};
    inet_pton(AF_INET, "127.0.0.1", &target.sin_addr);
    sessions = atoi(arguments[4]);
    first.slots = calloc(SLOTS, sizeof *first.slots);
    whole.slots = calloc(SLOTS, sizeof *whole.slots);
    make_requests(arguments[5], arguments[6]);
    poll_fd = epoll_create1(0);
    Connection *all = calloc(connections, sizeof *all);
    for (int i = 0; i < connections; i++) open_connection(all + i);
    run(atof(arguments[3]));
    return 0;
}
