/* Launches of CPU kernels on the threads of torch's OpenMP library; `launch.py` compiles it and fills `ladder`.
 *
 * A kernel hands over a function of the number of a task and of the number of tasks. The tasks are cut into as
 * many ranges as there are threads. A thread takes the tasks of its own range, then what is left of the others':
 * no task waits for a thread that sleeps or has lost its core.
 *
 * OpenMP's regions end when each thread has come by. Where that lasted longer than it takes to compute alone, the
 * cores are taken by others, and the caller computes alone for a while what is no more work than that, or anything
 * where another thread was given the caller's own core: longer each time that happens again.
 */

enum { MONOTONIC = 1, MOST_THREADS = 256, TASKS_OF_A_THREAD = 4, BODIES = 64 };
enum { LATE = 200000, SLICE = 4000000, PAUSE = 8, LONGEST_PAUSE = 64 };
static const long long ANY = 1LL << 62;

struct environment {
  void *barrier;
  int tasks;
};

typedef int (*Body)(int task, struct environment *, void *closure);

/* What the process tells: torch's functions, TVM's launch, and how many threads; 0 means torch's number. */
struct {
  void (*parallel)(void (*)(void *), void *, unsigned threads, unsigned flags);
  int (*thread_number)(void);
  int (*in_parallel)(void);
  int (*torch_threads)(void);
  int (*other)(Body, void *closure, int tasks);
  void (*raise)(const char *kind, const char *message);
  int threads;
} ladder;

/* Of the thread that calls: whether it computes alone; until when it does so for at most how much work, and how long
 * the last pause was; and the time that functions took its own part. */
static _Thread_local struct {
  int alone;
  int pause;
  long long until;
  long long most;
  struct part {
    Body body;
    long long time;
  } parts[BODIES];
} caller;

struct range {
  int next;
  int end;
  char line[56];
};

struct region {
  Body body;
  void *closure;
  struct environment environment;
  int threads;
  int failed;
  int core;
  int shared;
  long long own_end;
  struct range ranges[MOST_THREADS];
};

struct moment { /* timespec of 64 bits: headers are not needed */
  long seconds;
  long nanoseconds;
};

int clock_gettime(int clock, struct moment *);
int sched_getcpu(void);

static long long now(void) {
  struct moment at;
  clock_gettime(MONOTONIC, &at);
  return at.seconds * 1000000000LL + at.nanoseconds;
}

static void take(struct region *region, struct range *range) {
  while (__atomic_load_n(&range->next, __ATOMIC_RELAXED) < range->end) {
    int task = __atomic_fetch_add(&range->next, 1, __ATOMIC_RELAXED);
    if (task < range->end && region->body(task, &region->environment, region->closure))
      __atomic_store_n(&region->failed, 1, __ATOMIC_RELAXED);
  }
}

static void work(void *argument) {
  struct region *region = argument;
  int own = ladder.thread_number();
  if (own < region->threads)
    for (int turn = 0; turn < region->threads; ++turn) take(region, &region->ranges[(own + turn) % region->threads]);
  if (own == 0)
    region->own_end = now();
  else if (sched_getcpu() == region->core)
    __atomic_store_n(&region->shared, 1, __ATOMIC_RELAXED);
}

static int run_alone(Body body, void *closure, int tasks) {
  struct environment environment = {0, tasks > 0 ? tasks : 1};
  int failed = 0;
  for (int task = 0; task < environment.tasks; ++task) failed |= body(task, &environment, closure);
  return failed ? -1 : 0;
}

static struct part *part_of(Body body) {
  return &caller.parts[((unsigned long)body >> 4) % BODIES];
}

/* Note the time of the caller's own part: what it was at best, or a little more where it is longer now. */
static void note(struct part *part, Body body, long long own) {
  if (part->body != body || own < part->time)
    *part = (struct part){body, own};
  else
    part->time += (own - part->time) / 8;
}

/* Note whether the wait for the region's last thread, after the caller's own work, cost more than to compute alone:
 * whatever had a thread on the caller's own core did. The more threads, the more a pause costs, and the shorter it
 * is. */
static void judge(const struct part *part, const struct region *region, long long begin, long long end) {
  long long wait = end - region->own_end, own = region->own_end - begin, most = part->time;
  int others = region->threads - 1;
  if (region->shared && end - begin > LATE) {
    if (wait < SLICE) wait = end - begin < SLICE ? end - begin : SLICE;
    most = ANY;
  } else if (wait <= LATE + own * others) {
    if (part->time <= caller.most) caller.pause /= 2;
    return;
  }
  if (begin >= caller.until || most > caller.most) caller.most = most;
  caller.pause = caller.pause ? caller.pause * 2 : PAUSE;
  if (caller.pause > LONGEST_PAUSE) caller.pause = LONGEST_PAUSE;
  caller.until = end + wait * caller.pause / others;
}

static int run_together(Body body, void *closure, int tasks, int threads, int team) {
  struct region region;
  struct part *part = part_of(body);
  long long begin = now();
  if (begin < caller.until && part->body == body && part->time <= caller.most) return run_alone(body, closure, tasks);
  region.body = body;
  region.closure = closure;
  region.environment.barrier = 0;
  region.environment.tasks = tasks > 0 ? tasks : threads * TASKS_OF_A_THREAD;
  region.threads = threads;
  region.failed = region.shared = 0;
  region.core = sched_getcpu();
  region.own_end = begin;
  for (int at = 0; at < threads; ++at) {
    region.ranges[at].next = (long long)region.environment.tasks * at / threads;
    region.ranges[at].end = (long long)region.environment.tasks * (at + 1) / threads;
  }
  ladder.parallel(work, &region, team, 0);
  note(part, body, region.own_end - begin);
  judge(part, &region, begin, now());
  if (region.failed) ladder.raise("RuntimeError", "a thread of a kernel failed");
  return region.failed ? -1 : 0;
}

/* What kernels call instead of TVMBackendParallelLaunch. */
int ladder_launch(Body body, void *closure, int tasks) {
  if (caller.alone || ladder.threads == 1) return run_alone(body, closure, tasks);
  if (!ladder.parallel) return ladder.other(body, closure, tasks);
  int own = ladder.torch_threads();
  int threads = ladder.threads ? ladder.threads : own;
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  if (threads == 1 || ladder.in_parallel()) return run_alone(body, closure, tasks);
  return run_together(body, closure, tasks, threads, own > threads ? own : threads); /* teams of one size stay */
}

/* Let launches of this thread compute in it, or not. */
void ladder_alone(int alone) { caller.alone = alone; }
