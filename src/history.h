/*-------------------------------------------------------------------------
 *
 * history.h
 *	  Counters folded into the table idem_history, minute by minute.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_HISTORY_H
#define IDEM_HISTORY_H

#include "datatype/timestamp.h"

struct IdemStatsRow;

/* What a transaction has folded; it counts once that is committed */
typedef struct IdemFold
{
	TimestampTz now;			/* up to when */
	int			nrows;
	struct IdemStatsRow *rows;
} IdemFold;

extern void idem_history_fold(IdemFold *fold);
extern void idem_history_folded(const IdemFold *fold);
extern void idem_history_log_spikes(const IdemFold *fold);

#endif							/* IDEM_HISTORY_H */
