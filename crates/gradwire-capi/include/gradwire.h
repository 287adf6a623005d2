/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * One rank of a group, with its connections to all others, as a machine without IO. What each function promises and asks for is written
 * at its source, crates/gradwire-capi/src; a test keeps this file and that one alike.
 *
 * After every function that takes the time: gradwire_poll_event until GRADWIRE_NONE, gradwire_poll_transmit, then
 * gradwire_poll_timeout, and again gradwire_handle_timeout and gradwire_poll_transmit when that is due. Time is in nanoseconds and
 * never goes back. A rank is used by one thread at a time, and never from within the functions of a sink.
 *
 * Nothing here seals or checks a datagram: what is damaged on its way has to be dropped by who hands it in, as UDP's checksum does.
 */
#ifndef GRADWIRE_H
#define GRADWIRE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GRADWIRE_OK 0
#define GRADWIRE_NONE 1
#define GRADWIRE_NULL -1
#define GRADWIRE_INVALID -2

/* Number of this interface: a larger one where a structure, a function or a code is another. Of the library: gradwire_interface(). */
#define GRADWIRE_INTERFACE 1

/* Kinds of events. The call that one is of is in `call`, but of GRADWIRE_SERVED: there it is 0, since a server has named none. In
 * GRADWIRE_DONE of a worker of dedicated servers contributors_least is 0: only they know. After GRADWIRE_GROUP_FAILED every call fails. */
#define GRADWIRE_CONNECTED 1
#define GRADWIRE_DONE 2
#define GRADWIRE_FAILED 3
#define GRADWIRE_GROUP_FAILED 4
#define GRADWIRE_SERVED 5

typedef struct GradwireRank GradwireRank;

typedef struct GradwireConfig {
    uint32_t rank;
    uint32_t workers;
    uint32_t servers;
    uint32_t preset;
    uint32_t controller;
    uint32_t datagram_bytes;
    uint32_t ack_every;
    uint32_t paths;
    uint64_t eager_bytes;
    uint64_t initial_rate;
    uint64_t socket_bytes;
    uint64_t ack_delay_ns;
    uint64_t peer_timeout_ns;
} GradwireConfig;

typedef struct GradwireDatagram {
    uint32_t transfer;
    uint32_t call;
    uint32_t index;
    uint32_t path;
    uint32_t opens;
    uint32_t closes;
} GradwireDatagram;

typedef struct GradwireEvent {
    uint32_t kind;
    uint32_t contributors_least;
    uint64_t call;
    uint64_t bytes_sent;
    uint64_t bytes_sent_again;
    uint64_t elems_uncounted;
    uint64_t elems_filled;
} GradwireEvent;

typedef struct GradwireSink {
    void *context;
    int32_t (*has_room)(void *);
    void (*push)(void *, uint32_t, uint32_t, int32_t, const uint8_t *, size_t, const uint8_t *, size_t);
} GradwireSink;

/* `preset`: auto, mlt, dlcp, ltp, ultima or reliable, which GradwireConfig has as a number. Ranks are the workers, and after them the dedicated servers; 0 servers: every
 * worker is one. */
int32_t gradwire_config_default(const char *preset, uint32_t rank, uint32_t workers, uint32_t servers, GradwireConfig *config);
int32_t gradwire_describe(const uint8_t *bytes, size_t length, GradwireDatagram *datagram);
GradwireRank *gradwire_rank_new(const GradwireConfig *config, uint64_t now_ns);
void gradwire_rank_free(GradwireRank *rank);
/* Of workers: a dedicated server calls nothing. `input` and `output` are the same memory, or do not overlap. GRADWIRE_INVALID, and no
 * call: none or too many values, 4 GiB at most and less where datagrams are small (4194304 times what one carries: 1.6 GB with 512
 * bytes). A call that is not done 120 s after it was made, by the time that is handed in, ends as GRADWIRE_FAILED, and the group as
 * GRADWIRE_GROUP_FAILED. After a failed group it is GRADWIRE_OK, and the event is GRADWIRE_FAILED. */
int32_t gradwire_all_reduce(GradwireRank *rank, uint64_t now_ns, float *input, float *output, size_t elems, uint64_t *call);
int32_t gradwire_handle_datagram(GradwireRank *rank, uint64_t now_ns, uint32_t from, uint32_t ecn, const uint8_t *bytes, size_t length);
int32_t gradwire_handle_timeout(GradwireRank *rank, uint64_t now_ns);
int32_t gradwire_poll_transmit(GradwireRank *rank, uint64_t now_ns, const GradwireSink *sink);
uint64_t gradwire_poll_timeout(const GradwireRank *rank);
int32_t gradwire_poll_event(GradwireRank *rank, GradwireEvent *event);
uint32_t gradwire_interface(void);

#ifdef __cplusplus
}
#endif

#endif
