/*
 * expiry.pml: records in time: flip, carry over, seal, empty.
 *
 * SESSIONS sessions with TRANSACTIONS transactions each claim and complete
 * one or both of KEYS keys and commit or roll back; the worker takes the steps
 * of expiry in any order that their conditions allow; the clock ticks at any
 * time.  Ages are counted up to the retention, RETENTION ticks.
 *
 *	ONE_KEY		each transaction claims at most one key, whichever
 *	FIRST_SENT	claims say when the operation was first sent
 *	LEASE		the last key is under an open lease, which nobody ends, and a
 *				reader looks it up with an ordinary snapshot
 *	LOADER		a row of the last key is copied in by hand, into any generation;
 *				the sessions claim the other keys
 *
 * Checked:
 *	Once			until it was emptied, and for ever with first_sent	(commit)
 *	Same answer		a replay is what was stored					(transaction)
 *	Never early		what is emptied was committed, or came in with a
 *					completed_at, RETENTION ago						(empty)
 *	Leases stay		found by claims and by readers, wherever they are
 *	No lost work	everybody ends, old generations get empty		(Judge)
 */
#ifndef SESSIONS
#define SESSIONS		3
#endif
#ifndef KEYS
#define KEYS			2
#endif
#define GENERATIONS		3
#ifndef TRANSACTIONS
#define TRANSACTIONS	1
#endif
#ifndef RETENTION
#define RETENTION		2
#endif
#ifndef FAILURES
#define FAILURES		1
#endif
#ifndef FIRST_SENT
#define FIRST_SENT		false
#endif
#ifndef FLIPS
#define FLIPS			3
#endif

byte completed_age[GENERATIONS * KEYS];		/* of completed_at */
byte committed_age[GENERATIONS * KEYS];		/* of the commit */
#define WRITTEN_AT(r)	completed_age[r] = 0
#define COMMITTED_AT(r)	committed_age[r] = 0; NORMAL(r)
#define ABORTED_AT(r)	NORMAL(r)
#define FLIPPED			flips--
/* no age without a row, so that states are not told apart by it */
#define NORMAL(r) \
	completed_age[r] = (committed[r] == NONE -> 0 : completed_age[r])

#include "protocol.pml"

#ifdef LOADER
#define CLAIMED_KEYS	(KEYS - 1)
#else
#define CLAIMED_KEYS	KEYS
#endif
#define LOADED_BY		7

/* After a key, a transaction goes on to the next, or it is its only one */
#ifdef ONE_KEY
#define NEXT_KEY		CLAIMED_KEYS
#else
#define NEXT_KEY		k + 1
#endif

#ifdef LEASED_KEY_ONLY
#define FIRST_KEY		LAST_KEY
#else
#define FIRST_KEY		0
#endif

/* The notes of sealing, and how old they are */
bool sealed[GENERATIONS];
byte sealed_age[GENERATIONS];
byte flips = FLIPS, failures = FAILURES;

/* What happened in the world outside of idem's view */
byte executed[KEYS];			/* who has run it, as long as that counts */
byte ever_executed[KEYS];		/* who has, ever (bits) */
bool below_watermark[KEYS];		/* an execution is: it was emptied */
byte gone;						/* sessions that have come to their end */

/* The reader: what its snapshot shows is in this generation (0: not open) */
byte reads_in;
bool read_gone;					/* ... which was truncated */
byte reader_is_older;			/* than the sealing of these (bits) */

inline commit()
{
	d_step {
		for (r : 0 .. ROWS - 1) {
			if
			:: writer[r] == me && STATUS(OWN_VIEW(r)) == COMPLETED &&
				committed[r] == NONE ->
				assert(!executed[r % KEYS]);
				assert(!(FIRST_SENT && ever_executed[r % KEYS]));
				executed[r % KEYS] = me;
				ever_executed[r % KEYS] = ever_executed[r % KEYS] | BIT(me)
			:: else
			fi
		}
		r = 0;
		make_visible(); release_locks();
		REFRESH;
		begun = (begun < me -> me : begun)
	}
}

inline abort()
{
	d_step {
		failures > 0 ->
		failures--;
		undo_rows(); release_locks();
		REFRESH;
		begun = (begun < me -> me : begun)
	}
}

proctype Session(byte me)
{
	SESSION_STATE;
	bool known;
	byte transactions = TRANSACTIONS;

	begun == me - 1;
	k = FIRST_KEY;
	do
	:: transactions == 0 -> break
	:: transactions > 0 ->
		do
		:: k == CLAIMED_KEYS -> break
		:: k < CLAIMED_KEYS -> k++			/* not this one */
		:: k < CLAIMED_KEYS ->
			/* [idem_claim_key] */
#ifdef WATERMARK_FIRST
			known = !below_watermark[k];
#endif
			lock_and_find();
#ifndef WATERMARK_FIRST
			known = !below_watermark[k];
#endif
			if
			:: FINAL(found) ->
				assert(ever_executed[k] & BIT(VALUE(found)));
				if
				:: outcome == GOT -> d_step { DROP_LOCK(k) }
				:: else
				fi
			:: STATUS(found) == LEASED -> d_step { DROP_LOCK(k) }
			:: found == NONE && FIRST_SENT && !known -> d_step { DROP_LOCK(k) }
			:: found == NONE && !(FIRST_SENT && !known) ->
#ifdef LEASE
				assert(k != LAST_KEY);
#endif
				/* [idem_complete_claim] */
				write_record(CONTENT(COMPLETED, me))
			fi;
			assert(outcome != CONFLICT);
			d_step {
				known = false; outcome = 0; k = NEXT_KEY;
				found = NONE; found_in = 0; in_flux = 0
			}
		od;
		if
		:: commit()
		:: abort()
		fi;
		d_step { k = (transactions > 1 -> FIRST_KEY : 0); transactions-- }
	od;
	skip;
	d_step { FORGET_STORE; gone++ }
}

/*
 * [seal] no writer is left, no open lease is there
 */
inline seal(g)
{
	d_step {
		g != current && has_blocks[g] && !sealed[g] && WRITERS(g) == 0 &&
			!HAS_LEASE(g) ->
		partition_lock[g] = SHARE_ROW_EXCLUSIVE
	}
	d_step {
		sealed[g] = !HAS_LEASE(g);
		reader_is_older = reader_is_older |
			(reads_in != 0 && sealed[g] -> BIT(g) : 0);
		partition_lock[g] = FREE
	}
}

/*
 * [advance] somebody has written there since: seal it again, later
 */
inline unseal(g)
{
	d_step {
		sealed[g] && sealed_age[g] == RETENTION && WRITERS(g) != 0 ->
		sealed[g] = false; sealed_age[g] = 0
	}
}

/*
 * [empty] the rows are older than the retention, and so is the sealing
 */
#ifdef NO_SEAL
#define MAY_EMPTY(g)	(g != current && has_blocks[g])
#else
#define MAY_EMPTY(g)	(sealed[g] && sealed_age[g] == RETENTION)
#endif
#ifdef NO_SNAPSHOT_WAIT
#define OLD_READER(g)	false
#else
#define OLD_READER(g)	((reader_is_older & BIT(g)) != 0)
#endif
#define OLD_ROW(r) \
	(committed[r] == NONE || (STATUS(committed[r]) != LEASED && \
		completed_age[r] == RETENTION))
#define PROVED(g)		(OLD_ROW(ROW(g, 0)) && OLD_ROW(ROW(g, 1)))

inline expire(g)
{
	/* the long part, without a lock */
	MAY_EMPTY(g) && PROVED(g) && WRITERS(g) == 0 && !OLD_READER(g);
	if
	:: WRITERS(g) != 0
	:: d_step {
			WRITERS(g) == 0 -> partition_lock[g] = ACCESS_EXCLUSIVE
		}
		d_step {
			if
#ifdef OLD_PROOF
			:: true -> truncate(g)
#else
			:: PROVED(g) && !OLD_READER(g) -> truncate(g)
#endif
			:: else
			fi;
			partition_lock[g] = FREE
		}
	fi
}

inline truncate(g)
{
	for (k : 0 .. KEYS - 1) {
		r = ROW(g, k);
		assert(writer[r] == 0);
		assert(STATUS(committed[r]) != LEASED);
		if
		:: committed[r] == NONE
		:: committed[r] != NONE && VALUE(committed[r]) == LOADED_BY ->
			assert(completed_age[r] == RETENTION)
		:: committed[r] != NONE && VALUE(committed[r]) != LOADED_BY ->
			assert(committed_age[r] == RETENTION);
			executed[k] = 0; below_watermark[k] = true
		fi;
		committed[r] = NONE; completed_age[r] = 0; committed_age[r] = 0
	}
	k = 0; r = 0;
	read_gone = read_gone | (reads_in == g + 1);
	has_blocks[g] = false;
	sealed[g] = false; sealed_age[g] = 0
}

proctype Worker(byte me)
{
	SESSION_STATE;
end:
	do
	:: flip(flips > 0)
	:: carry_over(0)
	:: carry_over(1)
	:: carry_over(2)
	:: seal(0)
	:: seal(1)
	:: seal(2)
	:: unseal(0)
	:: unseal(1)
	:: unseal(2)
	:: expire(0)
	:: expire(1)
	:: expire(2)
	od
}

/* A completion has an age, before its commit and after; a lease has none */
#define YOUNG_ROW(r) \
	(FINAL(OWN_VIEW(r)) && (completed_age[r] < RETENTION || \
		(writer[r] == 0 && committed_age[r] < RETENTION)))
#define YOUNG_SEAL(g)	(sealed[g] && sealed_age[g] < RETENTION)

proctype Clock()
{
	byte r;
end:
	do
	:: d_step {
			YOUNG_ROW(0) || YOUNG_ROW(1) || YOUNG_ROW(2) || YOUNG_ROW(3) ||
				YOUNG_ROW(4) || YOUNG_ROW(5) ||
				YOUNG_SEAL(0) || YOUNG_SEAL(1) || YOUNG_SEAL(2) ->
			for (r : 0 .. ROWS - 1) {
				if
				:: YOUNG_ROW(r) ->
					completed_age[r] = completed_age[r] +
						(completed_age[r] < RETENTION -> 1 : 0);
					committed_age[r] = committed_age[r] +
						(writer[r] == 0 -> 1 : 0)
				:: else
				fi
			}
			for (r : 0 .. GENERATIONS - 1) {
				if
				:: YOUNG_SEAL(r) -> sealed_age[r]++
				:: else
				fi
			}
			r = 0
		}
	od
}

#ifdef LEASE
/*
 * [idem_record_find_mvcc] one snapshot; the generations in any one order
 */
active proctype Reader()
{
	byte g;

	d_step {
		/* where the snapshot sees the lease */
		g = (HAS_LEASE(0) -> 1 : (HAS_LEASE(1) -> 2 : 3));
		reads_in = g
	}
	partition_lock[g - 1] != ACCESS_EXCLUSIVE -> assert(!read_gone);
	d_step { reads_in = 0; read_gone = false; reader_is_older = 0; g = 0 }
}
#endif

#ifdef LOADER
/*
 * A plain INSERT into the generation that somebody names, or that was current
 * when the statement was planned.
 */
active proctype Loader()
{
	byte r, g;

	if
	:: g = 0
	:: g = 1
	:: g = 2
	fi;
	d_step {
		partition_lock[g] == FREE ->
		writers_top[g] = writers_top[g] | BIT(LOADED_BY)
	}
	d_step {
		r = ROW(g, LAST_KEY);
		writer[r] = LOADED_BY; top[r] = CONTENT(COMPLETED, LOADED_BY);
		completed_age[r] = 0;
		has_blocks[g] = true
	}
	d_step {
		writer[r] = 0; top[r] = UNCHANGED;
		committed[r] = CONTENT(COMPLETED, LOADED_BY); committed_age[r] = 0;
		writers_top[g] = writers_top[g] & ~BIT(LOADED_BY);
		r = 0; g = 0
	}
}
#endif

/*
 * When nothing can move any more, all sessions have come to their end, and
 * every generation but the current one is empty.
 */
active proctype Judge()
{
	timeout ->
	assert(gone == SESSIONS);
	assert(flips == 0 || (!has_blocks[NEXT] &&
		!has_blocks[(current + 2) % GENERATIONS]))
}

init {
	byte s;
	atomic {
#ifdef LEASE
		committed[ROW(0, LAST_KEY)] = CONTENT(LEASED, 0);
		has_blocks[0] = true;
#endif
		for (s : 1 .. SESSIONS) { run Session(s) }
		run Worker(WORKER); run Clock()
	}
}
