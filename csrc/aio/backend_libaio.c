/* SPDX-License-Identifier: Apache-2.0 */
/* backend_libaio.c - pieces through the kernel's io_submit(2), on one thread. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "queue.h"

struct entry {
	struct iocb iocb;
	struct ofl_aio_piece piece;
};

/*
 * Only the thread touches these after the start, except event_fd.  An entry is
 * free, unsent, or in the kernel; each array has room for all entries.
 */
struct ring {
	aio_context_t context;
	int event_fd; /* counts completions and calls of wake(): one thing to wait for */
	pthread_t thread;
	uint32_t num_entries, num_free, num_unsent;
	struct entry *entries;
	struct entry **free;
	struct iocb **unsent;
	struct io_event *events;
	bool wants_wake; /* under queue->lock: nothing left to take, it will wait */
};

static int sys_io_setup(unsigned int num_events, aio_context_t *context)
{
	return syscall(SYS_io_setup, num_events, context) < 0 ? -errno : 0;
}

static int sys_io_destroy(aio_context_t context)
{
	return syscall(SYS_io_destroy, context) < 0 ? -errno : 0;
}

static long sys_io_submit(aio_context_t context, long num, struct iocb **iocbs)
{
	long result = syscall(SYS_io_submit, context, num, iocbs);

	return result < 0 ? -errno : result;
}

static long sys_io_getevents(aio_context_t context, long max, struct io_event *events)
{
	struct timespec zero = {0};
	long result = syscall(SYS_io_getevents, context, 0L, max, events, &zero);

	return result < 0 ? -errno : result;
}

static struct entry *entry_of(uint64_t aio_data)
{
	return (struct entry *)(uintptr_t)aio_data;
}

static void prepare(const struct ring *ring, struct entry *entry)
{
	struct ofl_aio_rest rest = ofl_aio_piece_rest(&entry->piece);

	entry->iocb = (struct iocb){
		.aio_data = (uintptr_t)entry,
		.aio_lio_opcode =
			rest.operation == OFL_AIO_READ ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE,
		.aio_fildes = (uint32_t)rest.fd,
		.aio_buf = (uintptr_t)rest.buf,
		.aio_nbytes = rest.len,
		.aio_offset = (int64_t)rest.offset,
		.aio_flags = IOCB_FLAG_RESFD,
		.aio_resfd = (uint32_t)ring->event_fd,
	};
}

/* Hand a result to the common check; true if the entry is free again. */
static bool complete_entry(struct ofl_aio *queue, struct entry *entry, ssize_t result)
{
	struct ring *ring = queue->backend;
	enum ofl_aio_next next = ofl_aio_complete(queue, &entry->piece, result);

	if (next == OFL_AIO_FINISHED) {
		ring->free[ring->num_free++] = entry;
		return true;
	}
	if (next == OFL_AIO_RETRY)
		ofl_aio_pause(); /* rare, so simply on this thread */
	prepare(ring, entry);
	return false;
}

/* Take what there is room for; false once closing and nothing is left. */
static bool take_pieces(struct ofl_aio *queue)
{
	struct ring *ring = queue->backend;
	bool is_over;

	pthread_mutex_lock(&queue->lock);
	while (ring->num_free) {
		struct entry *entry = ring->free[ring->num_free - 1];

		if (!ofl_aio_take(queue, &entry->piece))
			break;
		ring->num_free--;
		prepare(ring, entry);
		ring->unsent[ring->num_unsent++] = &entry->iocb;
	}
	/* Without a free entry a completion comes first, and then it looks again. */
	ring->wants_wake = ring->num_free > 0;
	is_over = queue->is_closing && ring->num_free == ring->num_entries;
	pthread_mutex_unlock(&queue->lock);
	return !is_over;
}

static void drop_unsent(struct ring *ring, uint32_t num)
{
	ring->num_unsent -= num;
	for (uint32_t i = 0; i < ring->num_unsent; i++)
		ring->unsent[i] = ring->unsent[i + num];
}

/* Send all unsent entries; a refused one is judged as if it had completed.
 * Returns true if that freed an entry: then there may be more to take. */
static bool send_unsent(struct ofl_aio *queue)
{
	struct ring *ring = queue->backend;
	bool freed_any = false;

	while (ring->num_unsent) {
		long sent = sys_io_submit(ring->context, ring->num_unsent, ring->unsent);

		if (sent > 0) {
			drop_unsent(ring, (uint32_t)sent);
		} else if (complete_entry(queue, entry_of(ring->unsent[0]->aio_data),
					  sent ? sent : -EAGAIN)) {
			drop_unsent(ring, 1);
			freed_any = true;
		}
	}
	return freed_any;
}

/* Judge all completions that are there.  Does not block. */
static void reap(struct ofl_aio *queue)
{
	struct ring *ring = queue->backend;
	long num;

	do
		num = sys_io_getevents(ring->context, ring->num_entries, ring->events);
	while (num == -EINTR);
	for (long i = 0; i < num; i++) {
		struct entry *entry = entry_of(ring->events[i].data);

		if (!complete_entry(queue, entry, (ssize_t)ring->events[i].res))
			ring->unsent[ring->num_unsent++] = &entry->iocb;
	}
}

/* Wait for a completion or a call of wake().  Spurious returns do no harm. */
static void wait_for_event(const struct ring *ring)
{
	struct pollfd poll_fd = {.fd = ring->event_fd, .events = POLLIN};
	uint64_t count;

	if (poll(&poll_fd, 1, -1) < 0 || read(ring->event_fd, &count, sizeof(count)) < 0)
		ofl_aio_pause(); /* no memory: look again a little later */
}

static void *run_ring(void *argument)
{
	struct ofl_aio *queue = argument;

	while (take_pieces(queue)) {
		if (!send_unsent(queue))
			wait_for_event(queue->backend);
		reap(queue);
	}
	return NULL;
}

static void libaio_wake(struct ofl_aio *queue, size_t num_pieces)
{
	struct ring *ring = queue->backend;
	const uint64_t one = 1;

	if (num_pieces && !ring->wants_wake)
		return;
	ring->wants_wake = false;
	/* Fails only if the count is full, and then the thread is awake anyway. */
	if (write(ring->event_fd, &one, sizeof(one)) < 0)
		return;
}

static void free_ring(struct ring *ring)
{
	free(ring->events);
	free(ring->unsent);
	free(ring->free);
	free(ring->entries);
	free(ring);
}

static struct ring *allocate_ring(uint32_t num_entries)
{
	struct ring *ring = calloc(1, sizeof(*ring));

	if (!ring)
		return NULL;
	ring->num_entries = num_entries;
	ring->entries = calloc(num_entries, sizeof(*ring->entries));
	ring->free = calloc(num_entries, sizeof(*ring->free));
	ring->unsent = calloc(num_entries, sizeof(*ring->unsent));
	ring->events = calloc(num_entries, sizeof(*ring->events));
	if (!ring->entries || !ring->free || !ring->unsent || !ring->events) {
		free_ring(ring);
		return NULL;
	}
	for (uint32_t i = 0; i < num_entries; i++)
		ring->free[ring->num_free++] = &ring->entries[i];
	return ring;
}

static int libaio_start(struct ofl_aio *queue)
{
	struct ring *ring = allocate_ring(queue->queue_depth);
	int error;

	if (!ring)
		return -ENOMEM;
	ring->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (ring->event_fd < 0) {
		error = -errno;
		goto out_free;
	}
	error = sys_io_setup(queue->queue_depth, &ring->context);
	if (error)
		goto out_close;
	queue->backend = ring;
	error = ofl_aio_start_thread(&ring->thread, run_ring, queue);
	if (error)
		goto out_destroy;
	return 0;

out_destroy:
	sys_io_destroy(ring->context);
out_close:
	close(ring->event_fd);
out_free:
	free_ring(ring);
	return error;
}

static void libaio_stop(struct ofl_aio *queue)
{
	struct ring *ring = queue->backend;

	pthread_join(ring->thread, NULL);
	sys_io_destroy(ring->context);
	close(ring->event_fd);
	free_ring(ring);
}

const struct ofl_aio_backend_ops ofl_aio_backend_libaio = {
	.name = "libaio",
	.start = libaio_start,
	.wake = libaio_wake,
	.stop = libaio_stop,
};
