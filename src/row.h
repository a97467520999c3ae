/*-------------------------------------------------------------------------
 *
 * row.h
 *	  Put a row into a partition of a store, in the place of another, or take
 *	  it out.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_ROW_H
#define IDEM_ROW_H

#include "executor/tuptable.h"
#include "storage/itemptr.h"
#include "utils/relcache.h"

struct IdemStore;
struct IdemPartition;
struct IdemRecord;

extern void idem_row_insert(Relation heap, const struct IdemPartition *part,
							int generation, struct IdemRecord *record);
extern void idem_row_update(Relation heap, const struct IdemPartition *part,
							int generation, ItemPointer tid,
							const struct IdemRecord *record);
extern bool idem_row_is_own(Relation heap, const struct IdemPartition *part,
							ItemPointer tid, text *key, Datum *attempts);
extern TupleTableSlot *idem_row_take_out(struct IdemStore *store, text *key,
										 const struct IdemRecord *old);
extern void idem_row_write(struct IdemStore *store, Relation heap, text *key,
						   const struct IdemRecord *old,
						   const struct IdemRecord *record);

#endif							/* IDEM_ROW_H */
