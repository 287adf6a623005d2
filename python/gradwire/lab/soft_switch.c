// A switch as a program: takes Ethernet frames from one device for each port and gives them to the port in whose
// address they end, after what a link does to them. Started by soft_switch.py, which says more.
//
//   soft_switch DEVICE...            commands on standard input, one answer line for each on standard output:
//     shape PORT RATE DELAY LOSS AGAIN BUFFER  ->  ok  rate in bit/s, delay in ns, buffer in bytes; chances in 2^-32:
//                                                      to lose a packet, and to lose one after a lost one
//     cut PORT 0|1                       ->  ok        1: nothing comes through it in either direction, what waits is lost
//     count                              ->  count SEEN LOST OVERFLOWED, of all ports since the last shape
//     port PORT                          ->  port SEEN LOST OVERFLOWED, of this port since the start
//
// An egress port is arithmetic instead of a queue of timers: a frame begins to leave when the one before it has left,
// takes its bytes over the rate, and is delivered the delay later. So the rate is exact even when this process is woken
// late. A frame that would have to wait longer than the buffer holds is dropped. Losses are drawn before the buffer.
// As with tc, what waits when a port is shaped anew stays and leaves at the new rate, and nothing overtakes another frame.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PORTS_MAX = 16, FRAME_MAX = 1536, BATCH = 32, SLOTS = 1 << 14, SOCKET_BYTES = 16 << 20 };

struct frame {
	uint64_t left, due; // when its last bit has left the port, and when it is delivered
	uint32_t bytes;
	uint8_t data[FRAME_MAX];
};

struct port {
	int socket;
	uint64_t rate, delay, loss, again, buffer; // see above
	int is_cut, is_losing;                     // is_losing: the last packet was lost
	uint64_t seen, lost, overflowed;
	uint64_t free_at;                   // when the last frame will have left
	uint64_t first, next;               // frames under way are slots [first, next)
	struct frame *slots;
};

static struct port ports[PORTS_MAX];
static int port_count;
static uint64_t seen, lost, overflowed, random_state; // random_state: never 0

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

// xorshift64*; the upper half is good randomness.
static uint32_t random32(void)
{
	random_state ^= random_state >> 12;
	random_state ^= random_state << 25;
	random_state ^= random_state >> 27;
	return (random_state * 0x2545F4914F6CDD1D) >> 32;
}

static int open_device(const char *name)
{
	int fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0), on = 1, bytes = SOCKET_BYTES;
	if (fd < 0)
		fail("packet socket");
	struct sockaddr_ll address = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL) };
	address.sll_ifindex = if_nametoindex(name);
	setsockopt(fd, SOL_PACKET, PACKET_QDISC_BYPASS, &on, sizeof on);
	setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes);
	if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes))
		setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
	if (setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on))
		fail("ignoring our own frames");
	if (!address.sll_ifindex || bind(fd, (struct sockaddr *)&address, sizeof address))
		fail(name);
	return fd;
}

// Puts a frame under way on the port that its destination address ends in (hosts count from 1).
static void forward(const uint8_t *data, uint32_t bytes, uint64_t at)
{
	if (bytes < ETH_HLEN || data[5] < 1 || data[5] > port_count)
		return;
	struct port *port = &ports[data[5] - 1];
	seen++, port->seen++;
	port->is_losing = random32() < (port->is_losing ? port->again : port->loss);
	if (port->is_losing || port->is_cut) {
		lost++, port->lost++;
		return;
	}
	uint64_t begins = port->free_at > at ? port->free_at : at;
	uint64_t waits_bytes = (begins - at) * port->rate / 8000000000;
	if (waits_bytes + bytes > port->buffer || port->next - port->first == SLOTS) {
		overflowed++, port->overflowed++;
		return;
	}
	port->free_at = begins + (uint64_t)bytes * 8000000000 / port->rate;
	struct frame *frame = &port->slots[port->next++ % SLOTS];
	frame->left = port->free_at;
	frame->due = frame->left + port->delay;
	frame->bytes = bytes;
	memcpy(frame->data, data, bytes);
}

static void take(struct port *port)
{
	static uint8_t data[BATCH][FRAME_MAX];
	struct iovec parts[BATCH];
	struct mmsghdr messages[BATCH] = { 0 };
	for (int i = 0; i < BATCH; i++) {
		parts[i] = (struct iovec){ data[i], FRAME_MAX };
		messages[i].msg_hdr = (struct msghdr){ .msg_iov = &parts[i], .msg_iovlen = 1 };
	}
	int count;
	do {
		count = recvmmsg(port->socket, messages, BATCH, MSG_DONTWAIT, NULL);
		uint64_t at = now();
		for (int i = 0; i < count && !port->is_cut; i++)
			forward(data[i], messages[i].msg_len, at);
	} while (count == BATCH);
}

// Delivers what is due. What the kernel has no room for is lost, as at a host that does not keep up.
static void deliver(struct port *port, uint64_t at)
{
	while (port->first < port->next && port->slots[port->first % SLOTS].due <= at) {
		struct iovec parts[BATCH];
		struct mmsghdr messages[BATCH] = { 0 };
		int count = 0;
		for (; count < BATCH && port->first + count < port->next; count++) {
			struct frame *frame = &port->slots[(port->first + count) % SLOTS];
			if (frame->due > at)
				break;
			parts[count] = (struct iovec){ frame->data, frame->bytes };
			messages[count].msg_hdr = (struct msghdr){ .msg_iov = &parts[count], .msg_iovlen = 1 };
		}
		int sent = sendmmsg(port->socket, messages, count, 0);
		port->first += sent > 0 ? sent : 1;
		if (sent <= 0)
			overflowed++, port->overflowed++;
	}
}

// When what would have left at `left` does so at another rate: as many bits are still to go before.
static uint64_t at_other_rate(uint64_t left, uint64_t at, uint64_t before, uint64_t after)
{
	return left <= at ? left : at + (uint64_t)((unsigned __int128)(left - at) * before / after);
}

// What has left is on the wire and arrives as it would have; what has not is under the new rate and delay.
static void shape(struct port *port, uint64_t rate, uint64_t delay, uint64_t at)
{
	for (uint64_t slot = port->first; slot < port->next; slot++) {
		struct frame *frame = &port->slots[slot % SLOTS];
		if (frame->left <= at)
			continue;
		frame->left = at_other_rate(frame->left, at, port->rate, rate);
		frame->due = frame->left + delay;
	}
	port->free_at = at_other_rate(port->free_at, at, port->rate, rate);
	port->rate = rate, port->delay = delay;
}

static void cut(struct port *port)
{
	uint64_t gone = port->next - port->first;
	lost += gone, port->lost += gone;
	port->first = port->next, port->free_at = 0;
}

static void obey(const char *line)
{
	unsigned long index, rate, delay, loss, again, buffer;
	int is_cut;
	if (sscanf(line, "shape %lu %lu %lu %lu %lu %lu", &index, &rate, &delay, &loss, &again, &buffer) == 6 &&
	    index < (unsigned long)port_count && rate > 0) {
		struct port *port = &ports[index];
		shape(port, rate, delay, now());
		port->loss = loss, port->again = again, port->buffer = buffer;
		seen = lost = overflowed = 0;
		printf("ok\n");
	} else if (sscanf(line, "cut %lu %d", &index, &is_cut) == 2 && index < (unsigned long)port_count) {
		ports[index].is_cut = is_cut;
		if (is_cut)
			cut(&ports[index]);
		printf("ok\n");
	} else if (sscanf(line, "port %lu", &index) == 1 && index < (unsigned long)port_count) {
		printf("port %lu %lu %lu\n", ports[index].seen, ports[index].lost, ports[index].overflowed);
	} else if (!strncmp(line, "count", 5)) {
		printf("count %lu %lu %lu\n", seen, lost, overflowed);
	} else {
		printf("what?\n");
	}
	fflush(stdout);
}

static void serve(void)
{
	struct pollfd fds[PORTS_MAX + 1] = { { .fd = 0, .events = POLLIN } };
	for (int i = 0; i < port_count; i++)
		fds[i + 1] = (struct pollfd){ .fd = ports[i].socket, .events = POLLIN };
	for (;;) {
		uint64_t at = now(), due = at + 1000000000;
		for (int i = 0; i < port_count; i++) {
			struct port *port = &ports[i];
			deliver(port, at);
			if (port->first < port->next && port->slots[port->first % SLOTS].due < due)
				due = port->slots[port->first % SLOTS].due;
		}
		at = now();
		uint64_t wait = due > at ? due - at : 0;
		struct timespec time = { wait / 1000000000, wait % 1000000000 };
		if (ppoll(fds, port_count + 1, &time, NULL) <= 0)
			continue;
		for (int i = 0; i < port_count; i++)
			if (fds[i + 1].revents)
				take(&ports[i]);
		if (fds[0].revents) {
			char line[256];
			if (!fgets(line, sizeof line, stdin))
				return;
			obey(line);
		}
	}
}

int main(int argc, char **argv)
{
	if (argc < 2 || argc > PORTS_MAX + 1)
		return 2;
	setvbuf(stdin, NULL, _IONBF, 0);
	prctl(PR_SET_TIMERSLACK, 1000);
	while (!random_state) // a seed of its own, or the switches of all rails would lose the same packets
		if (getrandom(&random_state, sizeof random_state, 0) < 0)
			fail("randomness");
	port_count = argc - 1;
	for (int i = 0; i < port_count; i++) {
		ports[i].slots = calloc(SLOTS, sizeof *ports[i].slots);
		if (!ports[i].slots)
			fail("memory");
		ports[i].rate = 1000000000, ports[i].buffer = 1 << 20;
		ports[i].socket = open_device(argv[i + 1]);
	}
	printf("ready\n");
	fflush(stdout);
	serve();
	return 0;
}
