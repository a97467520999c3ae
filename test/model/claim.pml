/*
 * claim.pml: claims inside transactions.
 *
 * SESSIONS sessions, each with one transaction after the other until it has
 * its answers: claim (at once or by making it good early), complete, release,
 * SAVEPOINT, ROLLBACK TO, COMMIT, ROLLBACK or the end of the backend, on one
 * or both of KEYS keys; expiry flips to the next generation at any time; an
 * older transaction may have left a released record.  Retention does not
 * pass here: see expiry.pml.
 *
 * Checked:
 *	Once			of those told "claimed", one commits			(committing)
 *	Together		the record is there when the work is			(committing)
 *	Same answer		a replay is what was stored						(replay)
 *	No lost work	everybody ends, and the work was done			(Judge)
 */
#ifndef SESSIONS
#define SESSIONS		3
#endif
#define KEYS			2
#define GENERATIONS		3
#define WRITTEN_AT(r)	skip
#define COMMITTED_AT(r)	skip
#define ABORTED_AT(r)	skip
#define FLIPPED			skip
#include "protocol.pml"

/*
 * How often in a run, by whichever session: a transaction is given up or does
 * not do what it claimed for; has a savepoint; makes a claim good early.
 */
#ifndef FAILURES
#define FAILURES		1
#endif
#ifndef SAVEPOINTS
#define SAVEPOINTS		1
#endif
#ifndef EARLY
#define EARLY			1
#endif
byte failures = FAILURES, savepoints = SAVEPOINTS, early = EARLY;

/* A claim in the list of a transaction [pending.c] */
#define NOT_CLAIMED		0
#define HELD			1
#define DONE			2

/* What happened in the world outside of idem's view */
byte executed[KEYS];			/* whose work on the key is committed */
byte gone;						/* sessions that have come to their end */

/*
 * [idem_claim_key] after the pending list was asked.
 */
inline claim()
{
	lock_and_find();
	if
	:: outcome == TIMED_OUT
	:: outcome == ANSWERED -> replay()
	:: outcome == GOT && FINAL(found) ->
		d_step { DROP_LOCK(k) }
		replay()
	:: outcome == GOT && !FINAL(found) ->
		if
		:: d_step {
				claim_state[k] = HELD; work[k] = level;
				replaces[k] = (found != NONE);
				found = NONE; found_in = 0
			}
		:: /* [make_good] a row for the lock */
			d_step { early > 0 -> early-- };
			write_record(CONTENT(RELEASED, me));
			if
			:: outcome == CONFLICT
			:: else ->
				d_step {
					DROP_LOCK(k);
					claim_state[k] = HELD; has_row[k] = true; work[k] = level
				}
			fi
		fi
	fi
}

inline replay()
{
	d_step {
		assert(executed[k] == VALUE(found));
		answered[k] = true; found = NONE; found_in = 0
	}
}

/*
 * [idem_complete_claim]  Where the claim found nothing, the real one also asks
 * the other generations whether a record was copied in since
 * [idem_record_appeared]; claims must not need that.
 */
inline complete()
{
	if
	:: has_row[k] || replaces[k] -> look_again()
	:: else
	fi;
	if
	:: (found != NONE && STATUS(found) != RELEASED) ||
		(has_row[k] && found != CONTENT(RELEASED, me)) ->
		outcome = CONFLICT
	:: else ->
		if
		:: has_row[k] -> d_step { CAN_LOCK(k) -> TAKE_LOCK(k) }
		:: else
		fi;
		write_record(CONTENT(COMPLETED, me));
		if
		:: outcome == CONFLICT
		:: else ->
			d_step {
				if
				:: has_row[k] -> DROP_LOCK(k)
				:: else
				fi;
				claim_state[k] = DONE
			}
		fi
	fi
}

/*
 * [complete_released]
 */
inline look_again()
{
	do
	:: d_step { START_LOOKING }
		look_everywhere();
		if
		:: in_flux == 0 -> break
		:: else
		fi;
		!STILL_WRITES(in_flux); in_flux = 0
	od
}

/*
 * [subxact_callback, AbortSubTransaction] rows, then locks
 */
inline rollback_to_savepoint()
{
	d_step {
		for (r : 0 .. ROWS - 1) {
			if
			:: writer[r] == me ->
				sub[r] = UNCHANGED;
				writer[r] = (top[r] != UNCHANGED -> me : 0)
			:: else
			fi
		}
		r = 0
	}
	d_step {
		for (r : 0 .. KEYS - 1) {
			if
			:: key_owner[r] == me ->
				key_sub[r] = 0;
				key_owner[r] = (key_top[r] > 0 -> me : 0)
			:: else
			fi;
#ifndef NO_UNDO
			claim_state[r] = was_state[r]; has_row[r] = had_row[r];
#endif
			work[r] = had_work[r];
			replaces[r] = replaces[r] && claim_state[r] == HELD;
			was_state[r] = 0; had_row[r] = false; had_work[r] = 0
		}
		for (r : 0 .. GENERATIONS - 1) {
			writers_sub[r] = writers_sub[r] & ~BIT(me)
		}
		r = 0; level = 1
	}
}

inline release_savepoint()
{
	d_step {
		for (r : 0 .. ROWS - 1) {
			if
			:: writer[r] == me && sub[r] != UNCHANGED ->
				top[r] = sub[r]; sub[r] = UNCHANGED
			:: else
			fi
		}
		for (r : 0 .. KEYS - 1) {
			if
			:: key_owner[r] == me ->
				key_top[r] = key_top[r] + key_sub[r]; key_sub[r] = 0
			:: else
			fi;
			was_state[r] = 0; had_row[r] = false; had_work[r] = 0
		}
		for (r : 0 .. GENERATIONS - 1) {
			writers_top[r] = writers_top[r] | (writers_sub[r] & BIT(me));
			writers_sub[r] = writers_sub[r] & ~BIT(me)
		}
		r = 0; level = 1
	}
}

/*
 * COMMIT.  What must hold: of a key that was worked on there is a completion
 * by this transaction, nobody else has one, and without work there is none.
 */
inline commit()
{
	d_step {
		for (r : 0 .. ROWS - 1) {
			if
			:: writer[r] == me && OWN_VIEW(r) == CONTENT(COMPLETED, me) ->
				assert(work[r % KEYS]);
				work[r % KEYS] = 0;
				assert(!executed[r % KEYS]);
				executed[r % KEYS] = me;
				answered[r % KEYS] = true
			:: else
			fi
		}
		for (r : 0 .. KEYS - 1) { assert(!work[r]) }
		r = 0;
		make_visible(); release_locks();
		REFRESH
	}
}

inline abort()
{
	d_step { undo_rows(); release_locks(); REFRESH }
}

proctype Session(byte me; byte wanted)
{
	SESSION_STATE;
	byte claim_state[KEYS], was_state[KEYS];
	bool has_row[KEYS], had_row[KEYS], replaces[KEYS];
	byte work[KEYS], had_work[KEYS];	/* done in this transaction */
	bool answered[KEYS];
	bool failed;
	bool gave_up;				/* without an answer */

	begun == me - 1;
	do
	:: /* a transaction: the keys in one order, as in a batch */
		do
		:: k == KEYS && level == 1 -> break
		:: k == KEYS && level == 2 ->
			if
			:: rollback_to_savepoint()
			:: release_savepoint()
			fi
		:: k < KEYS && (!(wanted & BIT(k)) || answered[k] ||
				claim_state[k] == DONE) -> k++
		:: k < KEYS && (wanted & BIT(k)) && !answered[k] &&
				claim_state[k] != DONE ->
			if
			:: claim_state[k] == NOT_CLAIMED -> claim()
			:: claim_state[k] == HELD -> complete()
			:: d_step {
					/* [idem_release_claim] nothing was done; next time then */
					claim_state[k] == HELD && failures > 0 ->
					claim_state[k] = NOT_CLAIMED;
					has_row[k] = false; replaces[k] = false;
					work[k] = 0; failures--; k++
				}
			:: d_step {
					/* not completed, perhaps forgotten */
					claim_state[k] == HELD && failures > 0 ->
					failures--; k++
				}
			:: d_step { failures > 0 -> failures--; failed = true }
			:: d_step {
					savepoints > 0 && level == 1 ->
					savepoints--; level = 2;
					for (r : 0 .. KEYS - 1) {
						was_state[r] = claim_state[r]; had_row[r] = has_row[r];
						had_work[r] = work[r]
					}
					r = 0
				}
			:: level == 2 -> rollback_to_savepoint()
			:: level == 2 -> release_savepoint()
			fi;
			if
			:: outcome == CONFLICT ->
				assert(CONFLICTS);
				failed = true
			:: outcome == TIMED_OUT ->
				if
				:: d_step { failures > 0 -> failures--; failed = true }
				:: failures == 0 -> gave_up = true; break
				fi
			:: else -> outcome = 0
			fi;
			if
			:: failed -> break
			:: else
			fi
		od;
		if
		:: !failed && !gave_up && claim_state[0] != HELD && claim_state[1] != HELD -> commit()
		:: else -> abort()
		fi;
		d_step {
			for (k : 0 .. KEYS - 1) {
				claim_state[k] = NOT_CLAIMED; was_state[k] = 0;
				has_row[k] = false; had_row[k] = false; replaces[k] = false;
				work[k] = 0; had_work[k] = 0
			}
			k = 0; failed = false; outcome = 0;
			found = 0; found_in = 0; in_flux = 0
		}
		if
		:: gave_up || ((answered[0] || !(wanted & BIT(0))) &&
				(answered[1] || !(wanted & BIT(1)))) -> break
		:: else
		fi
	od;
	skip;
	d_step { FORGET_STORE; gone++; answered[0] = false; answered[1] = false }
}

proctype Worker(byte me)
{
	byte r;
end:
	do
	:: flip(true)
	od
}

/*
 * When nothing can move any more, everybody must have come to an end, and
 * all that somebody wanted done has been done.
 */
active proctype Judge()
{
	timeout ->
	assert(gone == SESSIONS);
#ifndef TIMEOUTS
	assert(executed[0] && executed[1])
#endif
}

init {
	atomic {
		if
		:: committed[ROW(0, 0)] = CONTENT(RELEASED, 0); has_blocks[0] = true
		:: skip
		fi;
		byte s;
		for (s : 1 .. SESSIONS) { run Session(s, BIT(KEYS) - 1) }
		run Worker(WORKER)
	}
}
