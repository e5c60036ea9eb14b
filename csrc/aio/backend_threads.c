/* SPDX-License-Identifier: Apache-2.0 */
/* backend_threads.c - pieces carried out by blocking calls on a pool of threads. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "queue.h"

struct pool {
	pthread_cond_t work; /* with queue->lock: pieces to take, or closing */
	uint32_t num_threads;
	pthread_t threads[];
};

static void run_piece(struct ofl_aio *queue, struct ofl_aio_piece *piece)
{
	enum ofl_aio_next next;

	do {
		struct ofl_aio_rest rest = ofl_aio_piece_rest(piece);

		next = ofl_aio_complete(queue, piece, queue->ops->transfer(queue, &rest));
		if (next == OFL_AIO_RETRY)
			ofl_aio_pause();
	} while (next != OFL_AIO_FINISHED);
}

static void *run_worker(void *argument)
{
	struct ofl_aio *queue = argument;
	struct pool *pool = queue->backend;
	struct ofl_aio_piece piece;

	pthread_mutex_lock(&queue->lock);
	for (;;) {
		if (ofl_aio_take(queue, &piece)) {
			pthread_mutex_unlock(&queue->lock);
			run_piece(queue, &piece);
			pthread_mutex_lock(&queue->lock);
		} else if (queue->is_closing) {
			break;
		} else {
			pthread_cond_wait(&pool->work, &queue->lock);
		}
	}
	pthread_mutex_unlock(&queue->lock);
	return NULL;
}

static void threads_wake(struct ofl_aio *queue, size_t num_pieces)
{
	struct pool *pool = queue->backend;

	if (num_pieces == 1)
		pthread_cond_signal(&pool->work);
	else
		pthread_cond_broadcast(&pool->work);
}

static void threads_stop(struct ofl_aio *queue)
{
	struct pool *pool = queue->backend;

	for (uint32_t i = 0; i < pool->num_threads; i++)
		pthread_join(pool->threads[i], NULL);
	pthread_cond_destroy(&pool->work);
	free(pool);
}

static int threads_start(struct ofl_aio *queue)
{
	struct pool *pool;
	int error;

	pool = calloc(1, sizeof(*pool) + queue->queue_depth * sizeof(pool->threads[0]));
	if (!pool)
		return -ENOMEM;
	error = -pthread_cond_init(&pool->work, NULL);
	if (error)
		goto out_free;
	queue->backend = pool;
	while (pool->num_threads < queue->queue_depth) {
		error = ofl_aio_start_thread(&pool->threads[pool->num_threads],
					     run_worker, queue);
		if (error)
			goto out_stop;
		pool->num_threads++;
	}
	return 0;

out_stop:
	pthread_mutex_lock(&queue->lock);
	queue->is_closing = true;
	threads_wake(queue, 0);
	pthread_mutex_unlock(&queue->lock);
	threads_stop(queue);
	return error;
out_free:
	free(pool);
	return error;
}

static ssize_t threads_transfer(struct ofl_aio *queue, const struct ofl_aio_rest *rest)
{
	ssize_t result;

	(void)queue;
	if (rest->operation == OFL_AIO_READ)
		result = pread(rest->fd, rest->buf, rest->len, (off_t)rest->offset);
	else
		result = pwrite(rest->fd, rest->buf, rest->len, (off_t)rest->offset);
	return result < 0 ? -errno : result;
}

const struct ofl_aio_backend_ops ofl_aio_backend_threads = {
	.name = "threads",
	.start = threads_start,
	.wake = threads_wake,
	.stop = threads_stop,
	.transfer = threads_transfer,
};
