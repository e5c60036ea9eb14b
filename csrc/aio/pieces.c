/* SPDX-License-Identifier: Apache-2.0 */
/* pieces.c - requests wait in lists, are cut into pieces, and completions are checked. */
#define _GNU_SOURCE
#include <errno.h>

#include "aio.h"
#include "queue.h"

/* ---- submission ---- */

static int check_transfer(const struct ofl_aio *queue, const struct ofl_aio_transfer *t)
{
	uint64_t low_bits = (uint64_t)t->alignment - 1;

	if (t->operation != OFL_AIO_READ && t->operation != OFL_AIO_WRITE)
		return -EINVAL;
	if (t->priority < 0 || t->priority >= OFL_AIO_NUM_PRIORITIES)
		return -EINVAL;
	if (t->alignment == 0 || (t->alignment & low_bits))
		return -EINVAL;
	if (((uintptr_t)t->buf | t->len | t->offset | queue->block_bytes) & low_bits)
		return -EINVAL;
	if (t->offset > INT64_MAX || t->len > INT64_MAX - t->offset)
		return -EOVERFLOW;
	return 0;
}

/* Called with the queue's lock held, as all functions of the lists. */
static void append_request(struct ofl_aio *queue, struct ofl_aio_request *request)
{
	int operation = request->transfer.operation;
	int priority = request->transfer.priority;

	request->previous = queue->waiting[operation][priority].last;
	if (request->previous)
		request->previous->next = request;
	else
		queue->waiting[operation][priority].first = request;
	queue->waiting[operation][priority].last = request;
}

static void remove_request(struct ofl_aio *queue, struct ofl_aio_request *request)
{
	int operation = request->transfer.operation;
	int priority = request->transfer.priority;

	if (request->previous)
		request->previous->next = request->next;
	else
		queue->waiting[operation][priority].first = request->next;
	if (request->next)
		request->next->previous = request->previous;
	else
		queue->waiting[operation][priority].last = request->previous;
	request->next = request->previous = NULL;
}

static size_t latency_index(int64_t latency_ns)
{
	int64_t latency_us = latency_ns / 1000;
	size_t index = 0;

	while (latency_us > 1 && index < OFL_AIO_NUM_LATENCIES - 1) {
		latency_us /= 2;
		index++;
	}
	return index;
}

void ofl_aio_count_time(struct ofl_aio *queue, int64_t now)
{
	const bool reads = queue->num_requests[OFL_AIO_READ];
	const bool writes = queue->num_requests[OFL_AIO_WRITE];
	const uint64_t elapsed_ns = (uint64_t)(now - queue->counted_ns);

	queue->counted_ns = now;
	queue->stats.in_flight_ns += reads || writes ? elapsed_ns : 0;
	queue->stats.read_in_flight_ns += reads ? elapsed_ns : 0;
	queue->stats.write_in_flight_ns += writes ? elapsed_ns : 0;
}

static void begin_request(struct ofl_aio *queue, const struct ofl_aio_request *request)
{
	ofl_aio_count_time(queue, ofl_aio_now_ns());
	queue->num_requests[request->transfer.operation]++;
}

/* Count a request that is done. */
static void end_request(struct ofl_aio *queue, const struct ofl_aio_request *request)
{
	struct ofl_aio_stats *stats = &queue->stats;
	int64_t now = ofl_aio_now_ns();
	int64_t latency_ns = now - request->submitted_ns;

	ofl_aio_count_time(queue, now);
	queue->num_requests[request->transfer.operation]--;
	if (request->transfer.operation == OFL_AIO_READ) {
		stats->read_requests++;
		stats->read_ns += (uint64_t)latency_ns;
		stats->read_latencies[latency_index(latency_ns)]++;
	} else {
		stats->write_requests++;
		stats->write_ns += (uint64_t)latency_ns;
		stats->write_latencies[latency_index(latency_ns)]++;
	}
}

static void count_bytes(struct ofl_aio *queue, int operation, size_t num_bytes)
{
	if (operation == OFL_AIO_READ)
		queue->stats.read_bytes += num_bytes;
	else
		queue->stats.write_bytes += num_bytes;
	if (queue->num_requests[OFL_AIO_READ] && queue->num_requests[OFL_AIO_WRITE])
		queue->stats.both_bytes += num_bytes;
}

int ofl_aio_submit(struct ofl_aio *queue, const struct ofl_aio_transfer *transfer,
		   struct ofl_aio_request **request)
{
	struct ofl_aio_request *r = NULL;
	int error = check_transfer(queue, transfer);

	if (error)
		return error;
	error = ofl_aio_create_request(transfer, &r);
	if (error)
		return error;
	*request = r; /* the caller's hold keeps it, even if it is done at once */
	pthread_mutex_lock(&queue->lock);
	begin_request(queue, r);
	if (transfer->len) {
		append_request(queue, r);
		queue->ops->wake(queue, (transfer->len - 1) / queue->block_bytes + 1);
	} else {
		end_request(queue, r);
	}
	pthread_mutex_unlock(&queue->lock);
	if (!transfer->len)
		ofl_aio_announce_done(r);
	return 0;
}

/* The most urgent request of a direction, NULL if none waits. */
static struct ofl_aio_request *first_waiting(struct ofl_aio *queue, int operation)
{
	struct ofl_aio_request *request = NULL;

	for (int p = 0; p < OFL_AIO_NUM_PRIORITIES && !request; p++)
		request = queue->waiting[operation][p].first;
	return request;
}

/*
 * [Note: both directions] While both wait, the less urgent one keeps a part of the
 * pieces in flight.  A device that reads and writes at the same time, each at its
 * own rate, would else stand still in one direction: reads that are submitted
 * without end, each more urgent than any write, take every place.
 */
static struct ofl_aio_request *choose_request(struct ofl_aio *queue)
{
	struct ofl_aio_request *read = first_waiting(queue, OFL_AIO_READ);
	struct ofl_aio_request *write = first_waiting(queue, OFL_AIO_WRITE);
	struct ofl_aio_request *urgent, *other;
	uint32_t share = queue->queue_depth / OFL_AIO_LEAST_SHARE;

	if (!read || !write)
		return read ? read : write;
	urgent = read->transfer.priority <= write->transfer.priority ? read : write;
	other = urgent == read ? write : read;
	if (read->transfer.priority == write->transfer.priority)
		share = queue->queue_depth / 2;
	return queue->in_flight[other->transfer.operation] < share ? other : urgent;
}

bool ofl_aio_take(struct ofl_aio *queue, struct ofl_aio_piece *piece)
{
	struct ofl_aio_request *request = choose_request(queue);
	size_t len;

	if (!request)
		return false;
	len = request->transfer.len - request->cut_bytes;
	if (len > queue->block_bytes)
		len = queue->block_bytes;
	*piece = (struct ofl_aio_piece){
		.request = request,
		.start = request->cut_bytes,
		.len = len,
	};
	request->cut_bytes += len;
	request->num_pieces++;
	queue->in_flight[request->transfer.operation]++;
	if (request->cut_bytes == request->transfer.len)
		remove_request(queue, request);
	return true;
}

/* Take a request that is not wholly cut from its list; true if that ends it. */
static bool cancel_request(struct ofl_aio *queue, struct ofl_aio_request *request)
{
	remove_request(queue, request);
	request->result.error = -ECANCELED;
	request->result.done_bytes = request->cut_bytes;
	request->cut_bytes = request->transfer.len;
	if (request->num_pieces)
		return false;
	end_request(queue, request);
	return true;
}

void ofl_aio_cancel(struct ofl_aio *queue)
{
	struct ofl_aio_request *request, *ended = NULL;

	pthread_mutex_lock(&queue->lock);
	for (int operation = 0; operation < OFL_AIO_NUM_OPERATIONS; operation++) {
		while ((request = first_waiting(queue, operation))) {
			if (!cancel_request(queue, request))
				continue;
			request->next = ended;
			ended = request;
		}
	}
	pthread_mutex_unlock(&queue->lock);
	while ((request = ended)) {
		ended = request->next;
		ofl_aio_announce_done(request);
	}
}

/* ---- completion ---- */

/* The first byte that the next call transfers.  A short transfer of an O_DIRECT
 * file may end between two multiples of the alignment: start at the lower one
 * and move a few bytes again. */
static size_t resume_at(const struct ofl_aio_piece *piece)
{
	return piece->done_bytes & ~((size_t)piece->request->transfer.alignment - 1);
}

struct ofl_aio_rest ofl_aio_piece_rest(const struct ofl_aio_piece *piece)
{
	const struct ofl_aio_transfer *t = &piece->request->transfer;
	size_t from = resume_at(piece);

	return (struct ofl_aio_rest){
		.fd = t->fd,
		.operation = t->operation,
		.buf = (char *)t->buf + piece->start + from,
		.len = piece->len - from,
		.offset = t->offset + piece->start + from,
	};
}

/* Drop what was not handed out yet, and keep the error of the lowest byte. */
static void fail_request(struct ofl_aio *queue, const struct ofl_aio_piece *piece,
			 int error)
{
	struct ofl_aio_request *request = piece->request;
	size_t reached = piece->start + piece->done_bytes;

	if (request->cut_bytes < request->transfer.len) {
		remove_request(queue, request);
		request->cut_bytes = request->transfer.len;
	}
	/* done_bytes starts at len, so the first error is always lower. */
	if (reached < request->result.done_bytes) {
		request->result.error = error;
		request->result.done_bytes = reached;
	}
}

static void finish_piece(struct ofl_aio *queue, struct ofl_aio_piece *piece, int error)
{
	struct ofl_aio_request *request = piece->request;
	int operation = request->transfer.operation;
	bool is_done;

	pthread_mutex_lock(&queue->lock);
	count_bytes(queue, operation, piece->done_bytes);
	if (error)
		fail_request(queue, piece, error);
	request->num_pieces--;
	queue->in_flight[operation]--;
	is_done = !request->num_pieces && request->cut_bytes == request->transfer.len;
	if (is_done)
		end_request(queue, request);
	pthread_mutex_unlock(&queue->lock);
	if (is_done)
		ofl_aio_announce_done(request);
}

/* Note progress.  Returns 0, or -errno if there was none or too much. */
static int advance(struct ofl_aio_piece *piece, size_t num_bytes)
{
	size_t from = resume_at(piece);

	if (num_bytes > piece->len - from)
		return -EIO; /* more than was asked: nothing can be trusted */
	if (from + num_bytes <= piece->done_bytes)
		return piece->request->transfer.operation == OFL_AIO_READ ? -ENODATA
									  : -EIO;
	piece->done_bytes = from + num_bytes;
	piece->num_retries = 0;
	return 0;
}

enum ofl_aio_next ofl_aio_complete(struct ofl_aio *queue, struct ofl_aio_piece *piece,
				   ssize_t result)
{
	int error;

	if ((result == -EINTR || result == -EAGAIN) &&
	    piece->num_retries++ < OFL_AIO_MAX_RETRIES)
		return OFL_AIO_RETRY;
	error = result < 0 ? (int)result : advance(piece, (size_t)result);
	if (!error && piece->done_bytes < piece->len)
		return OFL_AIO_CONTINUE;
	finish_piece(queue, piece, error);
	return OFL_AIO_FINISHED;
}
