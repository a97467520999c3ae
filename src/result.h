/*-------------------------------------------------------------------------
 *
 * result.h
 *	  Results of operations as json.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RESULT_H
#define IDEM_RESULT_H

extern Datum idem_result_from_text(text *result);
extern Datum idem_result_from_value(Datum value, Oid type);

#endif							/* IDEM_RESULT_H */
