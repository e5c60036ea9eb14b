/* SPDX-License-Identifier: Apache-2.0 */
/* backend_uring.c - pieces through io_uring(7) and liburing, on one thread. */
#define _GNU_SOURCE
#include <errno.h>

#include "queue.h"

/* Without the library's header, or where the build says that it can't be linked, the
 * backend is there and refuses to start: whoever asks for it is told why. */
#if defined(__has_include) && !defined(OFL_AIO_NO_LIBURING)
#if __has_include(<liburing.h>)
#define HAVE_LIBURING
#endif
#endif

#ifdef HAVE_LIBURING

#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Of the kernel: one registered buffer is at most 1 GiB; larger memory takes several. */
#define MAX_REGISTERED_BYTES ((size_t)1 << 30)
#define NUM_REGISTERED	     256
#define NOT_REGISTERED	     (-1)
#define WAKE		     1 /* user_data of the poll; no entry has this address */

struct entry {
	struct ofl_aio_piece piece;
	int registered; /* index of the registered buffer that holds the piece */
};

struct registered {
	void *owner; /* the address that was given; one call may take several */
	char *start;
	size_t len; /* 0: the index is not in use */
};

/*
 * Only the thread touches these after the start, except event_fd and what is
 * named below.  An entry is free, in the submission ring, or in the kernel.
 */
struct ring {
	struct io_uring uring;
	int event_fd; /* wake() writes to it; the ring polls it */
	pthread_t thread;
	uint32_t num_entries, num_free;
	uint32_t num_retries; /* of io_uring_submit, in a row */
	struct entry *entries;
	struct entry **free;

	/* Under queue->lock. */
	bool wants_wake; /* the thread found nothing to take and will wait */
	bool takes_registered;
	uint32_t end_registered; /* indices below it may be in use */
	struct registered registered[NUM_REGISTERED];
};

/* ---- registered memory ---- */

static int update_registered(struct ring *ring, uint32_t index, struct registered to)
{
	struct iovec vector = {.iov_base = to.start, .iov_len = to.len};
	int result = io_uring_register_buffers_update_tag(&ring->uring, index, &vector,
							  NULL, 1);

	if (result < 0)
		return result;
	ring->registered[index] = to;
	if (to.len && index >= ring->end_registered)
		ring->end_registered = index + 1;
	return 0;
}

static int find_unused(const struct ring *ring)
{
	for (int i = 0; i < NUM_REGISTERED; i++)
		if (!ring->registered[i].len)
			return i;
	return -ENOSPC;
}

static void drop_registered(struct ring *ring, const void *owner)
{
	for (uint32_t i = 0; i < ring->end_registered; i++) {
		struct registered *r = &ring->registered[i];

		if (!r->len || r->owner != owner)
			continue;
		/* If the kernel refuses, its entry stays and is not used any more. */
		if (update_registered(ring, i, (struct registered){0}) < 0)
			*r = (struct registered){0};
	}
}

static int uring_register(struct ofl_aio *queue, void *buf, size_t len)
{
	struct ring *ring = queue->backend;
	size_t part_len;

	if (!ring->takes_registered)
		return -EOPNOTSUPP;
	for (size_t done = 0; done < len; done += part_len) {
		struct registered part = {.owner = buf, .start = (char *)buf + done};
		int result = find_unused(ring);

		part_len = len - done;
		if (part_len > MAX_REGISTERED_BYTES)
			part_len = MAX_REGISTERED_BYTES;
		part.len = part_len;
		if (result >= 0)
			result = update_registered(ring, (uint32_t)result, part);
		if (result < 0) {
			drop_registered(ring, buf);
			return result;
		}
	}
	return 0;
}

static void uring_unregister(struct ofl_aio *queue, void *buf)
{
	drop_registered(queue->backend, buf);
}

static int registered_index(const struct ring *ring, const struct ofl_aio_rest *rest)
{
	const char *start = rest->buf;

	for (uint32_t i = 0; i < ring->end_registered; i++) {
		const struct registered *r = &ring->registered[i];

		if (start >= r->start && rest->len <= r->len &&
		    (size_t)(start - r->start) <= r->len - rest->len)
			return (int)i;
	}
	return NOT_REGISTERED;
}

/* ---- entries ---- */

/* The submission ring has room for every entry, twice. */
static void prepare(struct ring *ring, struct entry *entry)
{
	struct ofl_aio_rest rest = ofl_aio_piece_rest(&entry->piece);
	struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
	unsigned int len = (unsigned int)rest.len; /* pieces are at most 1 GiB */

	if (entry->registered != NOT_REGISTERED) {
		if (rest.operation == OFL_AIO_READ)
			io_uring_prep_read_fixed(sqe, rest.fd, rest.buf, len, rest.offset,
						 entry->registered);
		else
			io_uring_prep_write_fixed(sqe, rest.fd, rest.buf, len,
						  rest.offset, entry->registered);
	} else if (rest.operation == OFL_AIO_READ) {
		io_uring_prep_read(sqe, rest.fd, rest.buf, len, rest.offset);
	} else {
		io_uring_prep_write(sqe, rest.fd, rest.buf, len, rest.offset);
	}
	io_uring_sqe_set_data(sqe, entry);
}

/* Hand a result to the common check; prepare what is left of the piece. */
static void complete_entry(struct ofl_aio *queue, struct entry *entry, ssize_t result)
{
	struct ring *ring = queue->backend;
	enum ofl_aio_next next = ofl_aio_complete(queue, &entry->piece, result);

	if (next == OFL_AIO_FINISHED) {
		ring->free[ring->num_free++] = entry;
		return;
	}
	if (next == OFL_AIO_RETRY)
		ofl_aio_pause(); /* rare, so simply on this thread */
	prepare(ring, entry);
}

/* Take what there is room for; false once closing and nothing is left. */
static bool take_pieces(struct ofl_aio *queue)
{
	struct ring *ring = queue->backend;
	bool is_over;

	pthread_mutex_lock(&queue->lock);
	while (ring->num_free) {
		struct entry *entry = ring->free[ring->num_free - 1];
		struct ofl_aio_rest rest;

		if (!ofl_aio_take(queue, &entry->piece))
			break;
		ring->num_free--;
		rest = ofl_aio_piece_rest(&entry->piece);
		entry->registered = registered_index(ring, &rest);
		prepare(ring, entry);
	}
	/* Without a free entry a completion comes first, and then it looks again. */
	ring->wants_wake = ring->num_free > 0;
	is_over = queue->is_closing && ring->num_free == ring->num_entries;
	pthread_mutex_unlock(&queue->lock);
	return !is_over;
}

/* The ring itself refuses for long: end the pieces that it did not take. */
static void fail_unsent(struct ofl_aio *queue, int error)
{
	struct ring *ring = queue->backend;
	const struct io_uring_sq *sq = &ring->uring.sq;
	unsigned int num_unsent = io_uring_sq_ready(&ring->uring);

	for (unsigned int i = 0; i < num_unsent; i++) {
		struct io_uring_sqe *sqe = &sq->sqes[(*sq->khead + i) & *sq->kring_mask];
		struct entry *entry = (struct entry *)(uintptr_t)sqe->user_data;

		if (!entry || sqe->user_data == WAKE)
			continue;
		/* It stays in the ring; it must not move bytes later. */
		io_uring_prep_nop(sqe);
		io_uring_sqe_set_data(sqe, NULL);
		entry->piece.num_retries = OFL_AIO_MAX_RETRIES;
		complete_entry(queue, entry, error);
	}
}

/* ---- the thread ---- */

static void arm_wake(struct ring *ring)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);

	if (!sqe)
		return;
	io_uring_prep_poll_add(sqe, ring->event_fd, POLLIN);
	sqe->user_data = WAKE;
}

static void on_wake(struct ring *ring)
{
	uint64_t count;

	/* Fails only if a spurious poll found nothing. */
	if (read(ring->event_fd, &count, sizeof(count)) < 0)
		ofl_aio_pause();
	arm_wake(ring);
}

/* Submit what is prepared, and wait for a completion or a wake(). */
static void submit_and_wait(struct ofl_aio *queue)
{
	struct ring *ring = queue->backend;
	int result = io_uring_submit_and_wait(&ring->uring, 1);

	if (result >= 0) {
		ring->num_retries = 0;
	} else if (result != -EINTR) {
		ofl_aio_pause();
		if (ring->num_retries++ >= OFL_AIO_MAX_RETRIES)
			fail_unsent(queue, result);
	}
}

/* Judge all completions that are there.  Does not block. */
static void reap(struct ofl_aio *queue)
{
	struct ring *ring = queue->backend;
	struct io_uring_cqe *cqe;

	while (io_uring_peek_cqe(&ring->uring, &cqe) == 0) {
		uint64_t data = cqe->user_data;
		int result = cqe->res;

		io_uring_cqe_seen(&ring->uring, cqe);
		if (data == WAKE)
			on_wake(ring);
		else if (data)
			complete_entry(queue, (struct entry *)(uintptr_t)data, result);
	}
}

static void *run_ring(void *argument)
{
	struct ofl_aio *queue = argument;

	arm_wake(queue->backend);
	while (take_pieces(queue)) {
		submit_and_wait(queue);
		reap(queue);
	}
	return NULL;
}

static void uring_wake(struct ofl_aio *queue, size_t num_pieces)
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

/* ---- start and stop ---- */

static void free_ring(struct ring *ring)
{
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
	if (!ring->entries || !ring->free) {
		free_ring(ring);
		return NULL;
	}
	for (uint32_t i = 0; i < num_entries; i++)
		ring->free[ring->num_free++] = &ring->entries[i];
	return ring;
}

static int open_uring(struct ring *ring)
{
	/* Twice the entries, for no-ops left by fail_unsent(), and the poll. */
	unsigned int size = 2 * ring->num_entries + 2;
	/* Completions are handled when the thread asks: no interrupt of its work. */
	int error = io_uring_queue_init(size, &ring->uring, IORING_SETUP_COOP_TASKRUN);

	if (error == -EINVAL) /* Linux before 5.19 */
		error = io_uring_queue_init(size, &ring->uring, 0);
	if (error)
		return error;
	ring->takes_registered =
		!io_uring_register_buffers_sparse(&ring->uring, NUM_REGISTERED);
	return 0;
}

static int uring_start(struct ofl_aio *queue)
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
	error = open_uring(ring);
	if (error)
		goto out_close;
	queue->backend = ring;
	error = ofl_aio_start_thread(&ring->thread, run_ring, queue);
	if (error)
		goto out_exit;
	return 0;

out_exit:
	io_uring_queue_exit(&ring->uring);
out_close:
	close(ring->event_fd);
out_free:
	free_ring(ring);
	return error;
}

static void uring_stop(struct ofl_aio *queue)
{
	struct ring *ring = queue->backend;

	pthread_join(ring->thread, NULL);
	io_uring_queue_exit(&ring->uring);
	close(ring->event_fd);
	free_ring(ring);
}

const struct ofl_aio_backend_ops ofl_aio_backend_uring = {
	.name = "io_uring",
	.start = uring_start,
	.wake = uring_wake,
	.stop = uring_stop,
	.register_memory = uring_register,
	.unregister_memory = uring_unregister,
};

#else /* HAVE_LIBURING */

static int uring_start(struct ofl_aio *queue)
{
	(void)queue;
	return -EOPNOTSUPP;
}

const struct ofl_aio_backend_ops ofl_aio_backend_uring = {
	.name = "io_uring",
	.start = uring_start,
};

#endif /* HAVE_LIBURING */
