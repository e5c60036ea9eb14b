/* SPDX-License-Identifier: Apache-2.0 */
/* queue.h - what the queue's files and the backends share; not installed. */
#ifndef OFL_AIO_QUEUE_H
#define OFL_AIO_QUEUE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "aio.h"

#define OFL_AIO_NS_PER_S       1000000000LL
#define OFL_AIO_NUM_PRIORITIES 3
#define OFL_AIO_NUM_OPERATIONS 2
/* One part in so many of the pieces in flight is kept for the less urgent direction. */
#define OFL_AIO_LEAST_SHARE 4

/*
 * EINTR and EAGAIN are retried after this pause, so many times in a row, about
 * five seconds: long enough for a passing shortage, short enough not to hang.
 */
#define OFL_AIO_RETRY_NS 1000000L
#ifndef OFL_AIO_MAX_RETRIES /* tests have less patience */
#define OFL_AIO_MAX_RETRIES 5000
#endif

/*
 * Lifetime: two holds, one of the caller until ofl_aio_release() and one of the
 * queue until the request is done; the last to let go frees it.
 */
struct ofl_aio_request {
	struct ofl_aio_transfer transfer; /* constant */

	/* Under the queue's lock, until the request is done. */
	struct ofl_aio_request *next, *previous; /* in the list of its priority */
	size_t cut_bytes;			 /* handed out as pieces so far */
	uint32_t num_pieces;			 /* handed out and not finished */
	struct ofl_aio_result result;
	int64_t submitted_ns; /* constant */

	atomic_uint num_holds;
	atomic_bool is_done; /* set with release order, after all fields above */
	pthread_mutex_t lock;
	pthread_cond_t done; /* with lock: is_done was set */
	int notify_fd;	     /* with lock; -1: none */
};

/* A part of a transfer, small enough for one call of the kernel. */
struct ofl_aio_piece {
	struct ofl_aio_request *request;
	size_t start; /* in the transfer, bytes */
	size_t len;
	size_t done_bytes; /* of this piece */
	uint32_t num_retries;
};

/* What is left of a piece: the arguments of the next call of the kernel. */
struct ofl_aio_rest {
	int fd;
	int operation;
	void *buf;
	size_t len;
	uint64_t offset;
};

/*
 * A backend moves pieces.  Its threads call ofl_aio_take() for more work,
 * carry a piece out, and hand the kernel's result to ofl_aio_complete(), until
 * nothing is left to take and the queue is closing.
 */
struct ofl_aio_backend_ops {
	const char *name;
	/* Start the threads.  Returns 0 or -errno, and then nothing is left. */
	int (*start)(struct ofl_aio *queue);
	/* There are num_pieces more to take, or (0) the queue is closing.  Called
	 * with queue->lock held; must not block. */
	void (*wake)(struct ofl_aio *queue, size_t num_pieces);
	/* Join the threads.  Called once queue->is_closing is set. */
	void (*stop)(struct ofl_aio *queue);
	/* Of backends that work piece by piece: one call of the kernel, which
	 * returns a count or -errno.  The "threads" backend calls it. */
	ssize_t (*transfer)(struct ofl_aio *queue, const struct ofl_aio_rest *rest);
	/* As ofl_aio_register() and its kin, with queue->lock held.  Of backends
	 * that have no use for it: all NULL. */
	int (*register_memory)(struct ofl_aio *queue, void *buf, size_t len);
	void (*unregister_memory)(struct ofl_aio *queue, void *buf);
	int (*register_file)(struct ofl_aio *queue, int fd);
	void (*unregister_file)(struct ofl_aio *queue, int fd);
};

struct ofl_aio {
	const struct ofl_aio_backend_ops *ops; /* constant */
	struct ofl_aio_options options;	       /* only during ops->start() */
	uint32_t queue_depth;		       /* constant */
	size_t block_bytes;		       /* constant */
	void *backend;			       /* belongs to the backend */
	void *faults;			       /* belongs to the backend "fault" */

	pthread_mutex_t lock; /* of all below */
	bool is_closing;
	struct {
		struct ofl_aio_request *first, *last;
	} waiting[OFL_AIO_NUM_OPERATIONS][OFL_AIO_NUM_PRIORITIES]; /* with bytes to cut */
	uint32_t in_flight[OFL_AIO_NUM_OPERATIONS]; /* pieces taken and not over */
	struct ofl_aio_stats stats;
	uint64_t num_requests[OFL_AIO_NUM_OPERATIONS]; /* submitted and not done */
	int64_t counted_ns; /* up to then stats has the time in flight */
};

enum ofl_aio_next {
	OFL_AIO_FINISHED, /* the piece is over; the backend forgets it */
	OFL_AIO_CONTINUE, /* submit ofl_aio_piece_rest() at once */
	OFL_AIO_RETRY,	  /* the same after a pause of OFL_AIO_RETRY_NS */
};

extern const struct ofl_aio_backend_ops ofl_aio_backend_uring;
extern const struct ofl_aio_backend_ops ofl_aio_backend_libaio;
extern const struct ofl_aio_backend_ops ofl_aio_backend_threads;
extern const struct ofl_aio_backend_ops ofl_aio_backend_fault;

/* As ofl_aio_open(), with a backend that has no name there. */
int ofl_aio_open_with(const struct ofl_aio_backend_ops *ops,
		      const struct ofl_aio_options *options, struct ofl_aio **queue);

/* Count the time up to now by what is in flight.  Called with queue->lock held. */
void ofl_aio_count_time(struct ofl_aio *queue, int64_t now);

int64_t ofl_aio_now_ns(void); /* of the clock that no change of the time moves */

/* Both holds are taken.  Returns 0 or -ENOMEM or another -errno. */
int ofl_aio_create_request(const struct ofl_aio_transfer *transfer,
			   struct ofl_aio_request **request);

/* Wake the waiters and give up the queue's hold.  Called without queue->lock. */
void ofl_aio_announce_done(struct ofl_aio_request *request);

/* Cut the next piece, if there is one.  Called with queue->lock held. */
bool ofl_aio_take(struct ofl_aio *queue, struct ofl_aio_piece *piece);

/* Judge the kernel's result for a piece.  Called without queue->lock. */
enum ofl_aio_next ofl_aio_complete(struct ofl_aio *queue, struct ofl_aio_piece *piece,
				   ssize_t result);

struct ofl_aio_rest ofl_aio_piece_rest(const struct ofl_aio_piece *piece);

/* pthread_create() with all signals blocked.  Returns 0 or -errno. */
int ofl_aio_start_thread(pthread_t *thread, void *(*run)(void *), void *argument);

void ofl_aio_pause(void); /* OFL_AIO_RETRY_NS */

#endif /* OFL_AIO_QUEUE_H */
