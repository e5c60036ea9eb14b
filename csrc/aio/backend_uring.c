/* SPDX-License-Identifier: Apache-2.0 */
/* backend_uring.c - pieces through io_uring(7) and liburing, on one thread. */
#define _GNU_SOURCE
#include <errno.h>

#include "queue.h"
#include "uring_registered.h"

#ifdef OFL_AIO_HAVE_LIBURING

#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define WAKE 1 /* user_data of the poll; no entry has this address */

struct entry {
	struct ofl_aio_piece piece;
	int memory; /* index of the registered memory that holds the piece, */
	int file;   /* and of its registered file; or OFL_AIO_NOT_REGISTERED */
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
	struct ofl_aio_registered registered;
};

/* ---- entries ---- */

/* The submission ring has room for every entry, twice. */
static void prepare(struct ring *ring, struct entry *entry)
{
	struct ofl_aio_rest rest = ofl_aio_piece_rest(&entry->piece);
	struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
	unsigned int len = (unsigned int)rest.len; /* pieces are at most 1 GiB */

	if (entry->file != OFL_AIO_NOT_REGISTERED)
		rest.fd = entry->file;
	if (entry->memory != OFL_AIO_NOT_REGISTERED) {
		if (rest.operation == OFL_AIO_READ)
			io_uring_prep_read_fixed(sqe, rest.fd, rest.buf, len, rest.offset,
						 entry->memory);
		else
			io_uring_prep_write_fixed(sqe, rest.fd, rest.buf, len,
						  rest.offset, entry->memory);
	} else if (rest.operation == OFL_AIO_READ) {
		io_uring_prep_read(sqe, rest.fd, rest.buf, len, rest.offset);
	} else {
		io_uring_prep_write(sqe, rest.fd, rest.buf, len, rest.offset);
	}
	if (entry->file != OFL_AIO_NOT_REGISTERED)
		io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
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

/* Look up what the kernel knows of a piece's memory and file.  Under queue->lock. */
static void find_registered(struct ofl_aio *queue, struct entry *entry)
{
	const struct ring *ring = queue->backend;
	struct ofl_aio_rest rest = ofl_aio_piece_rest(&entry->piece);

	entry->memory =
		ofl_aio_registered_find_memory(&ring->registered, rest.buf, rest.len);
	entry->file = ofl_aio_registered_find_file(&ring->registered, rest.fd);
	queue->stats.registered_memory_pieces += entry->memory != OFL_AIO_NOT_REGISTERED;
	queue->stats.registered_file_pieces += entry->file != OFL_AIO_NOT_REGISTERED;
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
		find_registered(queue, entry);
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

/* ---- registered memory and files ---- */

static int uring_register_memory(struct ofl_aio *queue, void *buf, size_t len)
{
	struct ring *ring = queue->backend;

	return ofl_aio_registered_add_memory(&ring->registered, buf, len);
}

static void uring_unregister_memory(struct ofl_aio *queue, void *buf)
{
	struct ring *ring = queue->backend;

	ofl_aio_registered_drop_memory(&ring->registered, buf);
}

static int uring_register_file(struct ofl_aio *queue, int fd)
{
	struct ring *ring = queue->backend;

	return ofl_aio_registered_add_file(&ring->registered, fd);
}

static void uring_unregister_file(struct ofl_aio *queue, int fd)
{
	struct ring *ring = queue->backend;

	ofl_aio_registered_drop_file(&ring->registered, fd);
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
	ofl_aio_registered_init(&ring->registered, &ring->uring);
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
	ofl_aio_registered_exit(&ring->registered);
	io_uring_queue_exit(&ring->uring);
	close(ring->event_fd);
	free_ring(ring);
}

const struct ofl_aio_backend_ops ofl_aio_backend_uring = {
	.name = "io_uring",
	.start = uring_start,
	.wake = uring_wake,
	.stop = uring_stop,
	.register_memory = uring_register_memory,
	.unregister_memory = uring_unregister_memory,
	.register_file = uring_register_file,
	.unregister_file = uring_unregister_file,
};

#else /* OFL_AIO_HAVE_LIBURING */

static int uring_start(struct ofl_aio *queue)
{
	(void)queue;
	return -EOPNOTSUPP;
}

const struct ofl_aio_backend_ops ofl_aio_backend_uring = {
	.name = "io_uring",
	.start = uring_start,
};

#endif /* OFL_AIO_HAVE_LIBURING */
