/* SPDX-License-Identifier: Apache-2.0 */
/* aio.c - queues, requests, cutting into pieces, and the check of completions. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "aio.h"
#include "queue.h"

#define NS_PER_S 1000000000LL

static const struct ofl_aio_backend_ops *const backends[] = {
	&ofl_aio_backend_uring,
	&ofl_aio_backend_libaio,
	&ofl_aio_backend_threads,
	&ofl_aio_backend_fault,
};

/* ---- queues ---- */

static int64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * NS_PER_S + time.tv_nsec;
}

int ofl_aio_open(const struct ofl_aio_options *options, struct ofl_aio **queue)
{
	if (!options->backend)
		return -EINVAL;
	for (size_t i = 0; i < sizeof(backends) / sizeof(backends[0]); i++)
		if (!strcmp(options->backend, backends[i]->name))
			return ofl_aio_open_with(backends[i], options, queue);
	return -EINVAL;
}

int ofl_aio_open_with(const struct ofl_aio_backend_ops *ops,
		      const struct ofl_aio_options *options, struct ofl_aio **queue)
{
	struct ofl_aio *q;
	int error;

	if (options->queue_depth < 1 || options->queue_depth > OFL_AIO_MAX_QUEUE_DEPTH)
		return -EINVAL;
	if (options->block_bytes < 1 || options->block_bytes > OFL_AIO_MAX_BLOCK_BYTES)
		return -EINVAL;
	q = calloc(1, sizeof(*q));
	if (!q)
		return -ENOMEM;
	q->ops = ops;
	q->options = *options;
	q->queue_depth = options->queue_depth;
	q->block_bytes = options->block_bytes;
	error = -pthread_mutex_init(&q->lock, NULL);
	if (error)
		goto out_free;
	error = ops->start(q);
	if (error)
		goto out_lock;
	q->options = (struct ofl_aio_options){0};
	*queue = q;
	return 0;

out_lock:
	pthread_mutex_destroy(&q->lock);
out_free:
	free(q);
	return error;
}

void ofl_aio_close(struct ofl_aio *queue)
{
	pthread_mutex_lock(&queue->lock);
	queue->is_closing = true;
	queue->ops->wake(queue, 0);
	pthread_mutex_unlock(&queue->lock);
	queue->ops->stop(queue);
	pthread_mutex_destroy(&queue->lock);
	free(queue);
}

int ofl_aio_register(struct ofl_aio *queue, void *buf, size_t len)
{
	int error;

	if (!buf || !len)
		return -EINVAL;
	if (!queue->ops->register_memory)
		return -EOPNOTSUPP;
	pthread_mutex_lock(&queue->lock);
	error = queue->ops->register_memory(queue, buf, len);
	pthread_mutex_unlock(&queue->lock);
	return error;
}

void ofl_aio_unregister(struct ofl_aio *queue, void *buf)
{
	if (!queue->ops->unregister_memory)
		return;
	pthread_mutex_lock(&queue->lock);
	queue->ops->unregister_memory(queue, buf);
	pthread_mutex_unlock(&queue->lock);
}

int ofl_aio_register_file(struct ofl_aio *queue, int fd)
{
	int error;

	if (fd < 0)
		return -EBADF;
	if (!queue->ops->register_file)
		return -EOPNOTSUPP;
	pthread_mutex_lock(&queue->lock);
	error = queue->ops->register_file(queue, fd);
	pthread_mutex_unlock(&queue->lock);
	return error;
}

void ofl_aio_unregister_file(struct ofl_aio *queue, int fd)
{
	if (!queue->ops->unregister_file)
		return;
	pthread_mutex_lock(&queue->lock);
	queue->ops->unregister_file(queue, fd);
	pthread_mutex_unlock(&queue->lock);
}

void ofl_aio_read_stats(struct ofl_aio *queue, struct ofl_aio_stats *stats)
{
	pthread_mutex_lock(&queue->lock);
	*stats = queue->stats;
	if (queue->num_requests)
		stats->in_flight_ns += (uint64_t)(now_ns() - queue->busy_since_ns);
	pthread_mutex_unlock(&queue->lock);
}

/* ---- requests ---- */

static int init_done_condition(pthread_cond_t *condition)
{
	pthread_condattr_t attributes;
	int error = pthread_condattr_init(&attributes);

	if (error)
		return -error;
	/* A change of the wall clock must not change a timeout. */
	error = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	if (!error)
		error = pthread_cond_init(condition, &attributes);
	pthread_condattr_destroy(&attributes);
	return -error;
}

static int create_request(const struct ofl_aio_transfer *transfer,
			  struct ofl_aio_request **request)
{
	struct ofl_aio_request *r = calloc(1, sizeof(*r));
	int error;

	if (!r)
		return -ENOMEM;
	r->transfer = *transfer;
	r->result.done_bytes = transfer->len;
	atomic_init(&r->num_holds, 2);
	atomic_init(&r->is_done, false);
	r->submitted_ns = now_ns();
	r->notify_fd = -1;
	error = -pthread_mutex_init(&r->lock, NULL);
	if (error)
		goto out_free;
	error = init_done_condition(&r->done);
	if (error)
		goto out_lock;
	*request = r;
	return 0;

out_lock:
	pthread_mutex_destroy(&r->lock);
out_free:
	free(r);
	return error;
}

void ofl_aio_release(struct ofl_aio_request *request)
{
	/* acq_rel: what the other holder did comes before the free() here. */
	if (atomic_fetch_sub_explicit(&request->num_holds, 1, memory_order_acq_rel) != 1)
		return;
	pthread_cond_destroy(&request->done);
	pthread_mutex_destroy(&request->lock);
	free(request);
}

static void write_event(int event_fd)
{
	const uint64_t one = 1;

	/* Fails only if the count is full, and then its reader is awake anyway. */
	if (write(event_fd, &one, sizeof(one)) < 0)
		return;
}

/* Wake the waiters and give up the queue's hold.  Without the queue's lock. */
static void announce_done(struct ofl_aio_request *request)
{
	pthread_mutex_lock(&request->lock);
	/* release: a reader that sees it set sees the result and the bytes. */
	atomic_store_explicit(&request->is_done, true, memory_order_release);
	pthread_cond_broadcast(&request->done);
	/* Under the lock, so that ofl_aio_notify() can take the descriptor back. */
	if (request->notify_fd >= 0)
		write_event(request->notify_fd);
	pthread_mutex_unlock(&request->lock);
	ofl_aio_release(request);
}

int ofl_aio_notify(struct ofl_aio_request *request, int event_fd)
{
	int error = 0;

	pthread_mutex_lock(&request->lock);
	if (event_fd >= 0 && request->notify_fd >= 0)
		error = -EBUSY;
	else
		request->notify_fd = event_fd;
	if (!error && event_fd >= 0 && ofl_aio_is_done(request))
		write_event(event_fd);
	pthread_mutex_unlock(&request->lock);
	return error;
}

int ofl_aio_is_done(struct ofl_aio_request *request)
{
	/* acquire: pairs with the release in announce_done(). */
	return atomic_load_explicit(&request->is_done, memory_order_acquire);
}

static struct timespec time_after(int64_t timeout_ns)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	time.tv_sec += timeout_ns / NS_PER_S;
	time.tv_nsec += timeout_ns % NS_PER_S;
	if (time.tv_nsec >= NS_PER_S) {
		time.tv_sec++;
		time.tv_nsec -= NS_PER_S;
	}
	return time;
}

int ofl_aio_wait(struct ofl_aio_request *request, int64_t timeout_ns)
{
	struct timespec deadline = {0};
	int error = 0;

	if (ofl_aio_is_done(request))
		return 0;
	if (timeout_ns == 0)
		return -ETIMEDOUT;
	if (timeout_ns > 0)
		deadline = time_after(timeout_ns);
	pthread_mutex_lock(&request->lock);
	while (!ofl_aio_is_done(request) && error != ETIMEDOUT) {
		if (timeout_ns < 0)
			error = pthread_cond_wait(&request->done, &request->lock);
		else
			error = pthread_cond_timedwait(&request->done, &request->lock,
						       &deadline);
	}
	pthread_mutex_unlock(&request->lock);
	return ofl_aio_is_done(request) ? 0 : -ETIMEDOUT;
}

int ofl_aio_result(struct ofl_aio_request *request, struct ofl_aio_result *result)
{
	if (!ofl_aio_is_done(request))
		return -EBUSY;
	*result = request->result;
	return 0;
}

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

static void begin_request(struct ofl_aio *queue, const struct ofl_aio_request *request)
{
	if (queue->num_requests++ == 0)
		queue->busy_since_ns = request->submitted_ns;
}

/* Count a request that is done. */
static void end_request(struct ofl_aio *queue, const struct ofl_aio_request *request)
{
	struct ofl_aio_stats *stats = &queue->stats;
	int64_t now = now_ns();
	int64_t latency_ns = now - request->submitted_ns;

	if (--queue->num_requests == 0)
		stats->in_flight_ns += (uint64_t)(now - queue->busy_since_ns);
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
}

int ofl_aio_submit(struct ofl_aio *queue, const struct ofl_aio_transfer *transfer,
		   struct ofl_aio_request **request)
{
	struct ofl_aio_request *r = NULL;
	int error = check_transfer(queue, transfer);

	if (error)
		return error;
	error = create_request(transfer, &r);
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
		announce_done(r);
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
		announce_done(request);
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
		announce_done(request);
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

/* ---- for the backends' threads ---- */

int ofl_aio_start_thread(pthread_t *thread, void *(*run)(void *), void *argument)
{
	sigset_t all, before;
	int error;

	/* Signals belong to the program's own threads. */
	sigfillset(&all);
	error = pthread_sigmask(SIG_SETMASK, &all, &before);
	if (error)
		return -error;
	error = pthread_create(thread, NULL, run, argument);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!error)
		pthread_setname_np(*thread, "ofl-aio");
	return -error;
}

void ofl_aio_pause(void)
{
	const struct timespec pause = {.tv_nsec = OFL_AIO_RETRY_NS};

	nanosleep(&pause, NULL);
}
