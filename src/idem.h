/*-------------------------------------------------------------------------
 *
 * idem.h
 *	  Names shared by every file of idem: error codes, lock classes, settings.
 *
 * Externs are grouped by the file that owns them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_H
#define IDEM_H

/*
 * Error codes of idem's own.  Class "ID" is not used by the SQL standard nor
 * by PostgreSQL; callers tell the cases apart by these five characters.
 */
#define ERRCODE_IDEM_KEY_REUSED			MAKE_SQLSTATE('I','D','0','0','1')
#define ERRCODE_IDEM_IN_PROGRESS		MAKE_SQLSTATE('I','D','0','0','2')
#define ERRCODE_IDEM_UNCERTAIN			MAKE_SQLSTATE('I','D','0','0','3')
#define ERRCODE_IDEM_TOO_LATE			MAKE_SQLSTATE('I','D','0','0','4')
#define ERRCODE_IDEM_NOT_CLAIMED		MAKE_SQLSTATE('I','D','0','0','5')
#define ERRCODE_IDEM_UNFINISHED_CLAIM	MAKE_SQLSTATE('I','D','0','0','6')

/*
 * field4 of idem's advisory lock tags.  1 and 2 belong to SQL's
 * pg_advisory_lock(), 4 to 16 to Citus; these are "ID" and "IE" in ASCII.
 * Versions of idem loaded side by side in one cluster must agree on them.
 */
#define IDEM_LOCK_CLASS			0x4944	/* a key of a store */
#define IDEM_STORE_LOCK_CLASS	0x4945	/* the bookkeeping of a store */

/* idem.c: settings */
extern int	idem_wait_timeout;	/* milliseconds; -1 means no limit */
#ifdef USE_ASSERT_CHECKING
extern bool idem_debug_lock_collisions; /* all keys share one lock tag */
#endif

#endif							/* IDEM_H */
