/*
 * protocol.pml: what the models share: rows, locks, transactions, look-ups
 * and writes, in the steps in which src/ does them.
 *
 * A step (d_step) is what nobody can look into: one look into one partition,
 * one lock taken, one row written, all rows of a transaction becoming visible.
 * Between any two steps every other process may run.  Names in brackets are
 * the functions in src/ that a part stands for.
 *
 * The including file says how many SESSIONS, KEYS and GENERATIONS there are.
 * Session numbers start with 1; the last one is expiry's worker.
 *
 * Planted faults (-D) and where they bite are listed in test/model/run.
 */

#define WORKER			(SESSIONS + 1)
#define ROWS			(GENERATIONS * KEYS)
#define ROW(g, k)		((g) * KEYS + (k))

/*
 * A row is a status and a value: who wrote the result, or the token of the
 * lease, which is even while the lease runs and odd when it has run out.
 */
#define NONE			0
#define RELEASED		1
#define LEASED			2
#define COMPLETED		3
#define SKIPPED			4
#define CONTENT(status, value)	((status) + 8 * (value))
#define STATUS(content)	((content) % 8)
#define VALUE(content)	((content) / 8)
#define FINAL(content)	(STATUS(content) >= COMPLETED)
#define UNCHANGED		255

/*
 * What stands in a partition under a key: the committed row, and what one
 * open transaction makes of it, before (top) and after (sub) its savepoint.
 */
byte committed[ROWS];
byte top[ROWS] = UNCHANGED;
byte sub[ROWS] = UNCHANGED;
byte writer[ROWS];				/* whose transaction that is */

#define OWN_VIEW(r) \
	(sub[r] != UNCHANGED -> sub[r] : \
		(top[r] != UNCHANGED -> top[r] : committed[r]))

/* The lock of a key: who has it, and how often, by savepoint level */
byte key_owner[KEYS];
byte key_top[KEYS];
byte key_sub[KEYS];

#ifdef COLLISION				/* two keys, one hash */
#define LOCK_OF(k)		0
#else
#define LOCK_OF(k)		(k)
#endif

/* Partition locks: who may have written (bits), and the worker's */
byte writers_top[GENERATIONS];
byte writers_sub[GENERATIONS];
#define WRITERS(g)		(writers_top[g] | writers_sub[g])
#define BIT(s)			(1 << (s))
#define FREE			0
#define SHARE_ROW_EXCLUSIVE	1	/* keeps writers out */
#define ACCESS_EXCLUSIVE	2	/* and readers */
byte partition_lock[GENERATIONS];

/* Bookkeeping, and what each session believes of it */
byte current;
byte believed[WORKER + 1];
bool invalidated[WORKER + 1];
bool has_blocks[GENERATIONS];

/*
 * Sessions that are alike may be numbered in the order of their first look,
 * so that the same run under other numbers is not checked again: a session
 * waits for begun == me - 1 before it starts.
 */
byte begun;

#ifdef OLD_SNAPSHOT
#define SNAPSHOT		; byte snapshot[ROWS]
#else
#define SNAPSHOT
#endif

/* A session that works on one thing at a time */
#define SESSION_STATE \
	byte k;						/* the key */ \
	byte level = 1;				/* 2: in a savepoint */ \
	byte outcome;				/* of an inline below */ \
	byte i, r;					/* counters */ \
	byte found, found_in;		/* content and generation of the record */ \
	byte old, old_in;			/* ... as it was before */ \
	byte in_flux, added;		/* who is changing, adding a record */ \
	bool had_lock \
	SNAPSHOT

/* Outcomes */
#define GOT				1		/* locked and looked up */
#define ANSWERED		2		/* a final record, without the lock */
#define TIMED_OUT		3
#define WRITTEN			4
#define CONFLICT		5		/* 40001 */

/* Without a fault nobody gets into anybody's way */
#if defined(NO_LOCK) || defined(OLD_SNAPSHOT) || defined(UNLOCK_EARLY)
#define CONFLICTS		true
#else
#define CONFLICTS		false
#endif

/* [AcceptInvalidationMessages, idem_store_refresh] within a step */
#define REFRESH \
	believed[me] = (invalidated[me] -> current : believed[me]); \
	invalidated[me] = false

/* Who is gone knows nothing: fewer states to tell apart */
#define FORGET_STORE	believed[me] = 0; invalidated[me] = true

/*
 * [idem_key_lock, idem_key_unlock] within a step
 */
#ifdef NO_LOCK
#define CAN_LOCK(k)		true
#define TAKE_LOCK(k)	skip
#define DROP_LOCK(k)	skip
#else
#define CAN_LOCK(k) \
	(key_owner[LOCK_OF(k)] == 0 || key_owner[LOCK_OF(k)] == me)
#define TAKE_LOCK(k) \
	key_owner[LOCK_OF(k)] = me; \
	key_top[LOCK_OF(k)] = key_top[LOCK_OF(k)] + (level == 1 -> 1 : 0); \
	key_sub[LOCK_OF(k)] = key_sub[LOCK_OF(k)] + (level == 2 -> 1 : 0)
#define DROP_LOCK(k) \
	assert(key_owner[LOCK_OF(k)] == me); \
	assert((level == 1 -> key_top[LOCK_OF(k)] : key_sub[LOCK_OF(k)]) > 0); \
	key_top[LOCK_OF(k)] = key_top[LOCK_OF(k)] - (level == 1 -> 1 : 0); \
	key_sub[LOCK_OF(k)] = key_sub[LOCK_OF(k)] - (level == 2 -> 1 : 0); \
	key_owner[LOCK_OF(k)] = \
		(key_top[LOCK_OF(k)] + key_sub[LOCK_OF(k)] > 0 -> me : 0)
#endif

/*
 * Look the key up in every generation, newest first, with a dirty snapshot.
 * [idem_record_find, find_in_generation, consider]
 *
 * The real look-up starts over where the store has changed meanwhile; this
 * one goes on, which is less and must be enough.
 */
#ifdef OLDEST_FIRST
#define NTH(i)			((believed[me] + 1 + (i)) % GENERATIONS)
#else
#define NTH(i)			((believed[me] + GENERATIONS - (i)) % GENERATIONS)
#endif

#ifdef OLD_SNAPSHOT
#define LOOKED_AT(r)	snapshot[r]		/* as the statement began */
#else
#define LOOKED_AT(r)	committed[r]
#endif

#define START_LOOKING \
	REFRESH; \
	begun = (begun < me && me < WORKER -> me : begun); \
	found = NONE; found_in = 0; in_flux = 0; added = 0; i = 0

inline look_everywhere()
{
	do
	:: d_step {
			i < GENERATIONS &&
				partition_lock[NTH(i)] != ACCESS_EXCLUSIVE ->
			r = ROW(NTH(i), k);
			if
			:: writer[r] == me && OWN_VIEW(r) != NONE ->
				found = OWN_VIEW(r); found_in = NTH(i)
			:: writer[r] == me && OWN_VIEW(r) == NONE
			:: writer[r] != me ->
#ifndef OLD_SNAPSHOT
				if
				:: writer[r] != 0 && committed[r] == NONE ->
					added = writer[r]
				:: writer[r] != 0 && committed[r] != NONE ->
					in_flux = writer[r]
				:: writer[r] == 0
				fi;
#endif
				if
				:: LOOKED_AT(r) != NONE && (found == NONE ||
						(FINAL(LOOKED_AT(r)) && !FINAL(found))) ->
					found = LOOKED_AT(r); found_in = NTH(i)
				:: else
				fi
			fi;
			r = 0; i++;
			/* a final record stands, whatever is added to it */
			in_flux = (i == GENERATIONS && in_flux == 0 && !FINAL(found) ->
				added : in_flux);
			added = (i == GENERATIONS -> 0 : added)
		}
	:: i == GENERATIONS -> i = 0; break
	od
}

/* Does this transaction still write a record of the key? */
#define STILL_WRITES(s) \
	((s) == writer[ROW(0, k)] || (s) == writer[ROW(1, k)] || \
		(s) == writer[ROW(2, k)])

/*
 * Lock the key and look it up.  [idem_key_lock_and_find]  Where the lock is
 * taken, a final record is the answer.
 */
inline lock_and_find()
{
#ifdef OLD_SNAPSHOT
	d_step {
		for (r : 0 .. ROWS - 1) { snapshot[r] = committed[r] }
		r = 0
	}
#endif
	do
	:: if
		:: d_step { CAN_LOCK(k) -> TAKE_LOCK(k); START_LOOKING }
		:: d_step { !CAN_LOCK(k) -> START_LOOKING }
			look_everywhere();
			if
			:: FINAL(found) && in_flux == 0 -> outcome = ANSWERED; break
			:: else
			fi;
			if
			:: d_step { CAN_LOCK(k) -> TAKE_LOCK(k); START_LOOKING }
#ifdef TIMEOUTS
			:: !CAN_LOCK(k) -> outcome = TIMED_OUT; break
#endif
			fi
		fi;
		look_everywhere();
		if
		:: in_flux == 0 -> outcome = GOT; break
		:: else -> d_step { DROP_LOCK(k) }
		fi;
		if
		:: !STILL_WRITES(in_flux) -> in_flux = 0
#ifdef TIMEOUTS
		:: STILL_WRITES(in_flux) -> outcome = TIMED_OUT; break
#endif
		fi
	od
}

/*
 * Lock a partition for writing, on behalf of the savepoint level, and see
 * whether it is still the current one.  [lock_current_generation]
 */
#define MAY_WRITE(g)	(partition_lock[g] == FREE)
#define LOCK_PARTITION(g) \
	writers_top[g] = writers_top[g] | (level == 1 -> BIT(me) : 0); \
	writers_sub[g] = writers_sub[g] | (level == 2 -> BIT(me) : 0)
#define HAS_PARTITION(g) \
	(((level == 1 -> writers_top[g] : writers_sub[g]) & BIT(me)) != 0)
#define UNLOCK_PARTITION(g) \
	writers_top[g] = writers_top[g] & ~(level == 1 -> BIT(me) : 0); \
	writers_sub[g] = writers_sub[g] & ~(level == 2 -> BIT(me) : 0)

inline lock_current_generation()
{
	do
	:: d_step {
			/* the conflicting lock is not the worker's own */
			MAY_WRITE(believed[me]) ->
			i = believed[me];
			had_lock = HAS_PARTITION(i);
			LOCK_PARTITION(i)
		}
		d_step {
#ifndef NO_REFRESH
			REFRESH;
#endif
			if
			:: believed[me] != i && !had_lock -> UNLOCK_PARTITION(i)
			:: else
			fi;
			had_lock = (believed[me] == i);
			i = 0
		}
		if
		:: had_lock -> had_lock = false; break
		:: else
		fi
	od
}

/* Change a row within a step */
#define CHANGE(r, content) \
	writer[r] = me; \
	top[r] = (level == 1 -> content : top[r]); \
	sub[r] = (level == 2 -> content : sub[r])

/*
 * Write the record of the key: new, or in the place of the one found.
 * [idem_record_insert, idem_record_replace, find_locked, idem_row_take_out, put]
 */
inline write_record(content)
{
	outcome = WRITTEN;
	do
	:: found == NONE -> break
	:: else ->
		/* [find_locked] again, with the partition locked */
		d_step {
			MAY_WRITE(found_in) ->
			LOCK_PARTITION(found_in);
			old = STATUS(found); old_in = found_in;
			START_LOOKING
		}
		look_everywhere();
		if
		:: STATUS(found) != old || in_flux != 0 -> outcome = CONFLICT; break
		:: else ->
			if
			:: found_in == old_in -> break
			:: else
			fi
		fi
	od;
	if
	:: outcome == CONFLICT
	:: else ->
		lock_current_generation();
		if
		:: found != NONE && found_in != believed[me] ->
			/* [idem_row_take_out] */
			d_step { CHANGE(ROW(found_in, k), NONE) }
		:: else
		fi;
		/* [put] */
		d_step {
			/* the unique index: whoever is there is waited for */
			writer[ROW(believed[me], k)] == 0 ||
				writer[ROW(believed[me], k)] == me ->
			r = ROW(believed[me], k);
			if
			:: OWN_VIEW(r) != NONE &&
				!(found != NONE && found_in == believed[me]) ->
				outcome = CONFLICT
			:: else ->
				CHANGE(r, content);
				WRITTEN_AT(r);
				has_blocks[believed[me]] = true
			fi;
			r = 0
		}
	fi;
	d_step { found = NONE; found_in = 0; in_flux = 0; old = 0; old_in = 0 }
}

/*
 * The end of a transaction: its rows first, then its locks; nobody who comes
 * between the two can do other than wait.  [CommitTransaction,
 * AbortTransaction]
 */
inline make_visible()
{
	for (r : 0 .. ROWS - 1) {
		if
		:: writer[r] == me ->
			committed[r] = OWN_VIEW(r);
			top[r] = UNCHANGED; sub[r] = UNCHANGED; writer[r] = 0;
			COMMITTED_AT(r)
		:: else
		fi
	}
	r = 0
}

inline undo_rows()
{
	for (r : 0 .. ROWS - 1) {
		if
		:: writer[r] == me ->
			top[r] = UNCHANGED; sub[r] = UNCHANGED; writer[r] = 0;
			ABORTED_AT(r)
		:: else
		fi
	}
	r = 0
}

inline release_locks()
{
	for (r : 0 .. KEYS - 1) {
		if
		:: key_owner[r] == me ->
			key_owner[r] = 0; key_top[r] = 0; key_sub[r] = 0
		:: else
		fi
	}
	for (r : 0 .. GENERATIONS - 1) {
		writers_top[r] = writers_top[r] & ~BIT(me);
		writers_sub[r] = writers_sub[r] & ~BIT(me)
	}
	r = 0; level = 1
}

/*
 * The next generation becomes current, if it is empty.  [flip]  Commit,
 * invalidations, locks: in that order.
 */
#define NEXT			((current + 1) % GENERATIONS)
inline flip(condition)
{
	d_step {
		condition && has_blocks[current] && !has_blocks[NEXT] ->
		current = NEXT;
		FLIPPED
	}
	d_step {
		for (r : 1 .. WORKER) { invalidated[r] = true }
		r = 0
	}
}

#define LAST_KEY		(KEYS - 1)

/*
 * [carry_over_leases] one in a transaction; a key in use is left alone
 */
#ifdef CARRY_UNLOCKED
#define KEY_IS_FREE(k)	true
#else
#define KEY_IS_FREE(k)	CAN_LOCK(k)
#endif
#define HAS_LEASE(g)	(STATUS(committed[ROW(g, LAST_KEY)]) == LEASED)

inline carry_over(g)
{
	d_step {
		g != current && HAS_LEASE(g) && KEY_IS_FREE(LAST_KEY) ->
		k = LAST_KEY;
#ifndef CARRY_UNLOCKED
		TAKE_LOCK(k);
#endif
		START_LOOKING
	}
	look_everywhere();
	if
	:: in_flux == 0 && STATUS(found) == LEASED && found_in == g &&
			believed[me] != g ->
		write_record(found)
	:: else
	fi;
	assert(CONFLICTS || outcome != CONFLICT);
	d_step {
		if
		:: outcome == CONFLICT -> undo_rows()
		:: else -> make_visible()
		fi;
		release_locks(); REFRESH;
		outcome = 0; k = 0; found = NONE; found_in = 0; in_flux = 0
	}
}
