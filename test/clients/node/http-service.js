'use strict';

/*
 * The service of http-test.js: http.js, with handlers to test it by.
 *
 *     node http-service.js [MOMENT REQUESTS]
 *
 * Prints its port.  After so many requests, the first one to come to that moment
 * makes it kill itself with SIGKILL.  The moments: "before the claim", "claimed",
 * "handled", "completed", "committing", "committed", "answering" (half the answer
 * is out); only of a request that is executed and not replayed.
 */

const http = require('node:http');
const { writeSync } = require('node:fs');
const { Pool } = require('pg');
const { listener } = require('./http.js');

const [deadly, patience] = process.argv.slice(2);
let requests = 0;

/* A moment has come. */
function comes(moment) {
  if (moment === deadly && requests > Number(patience)) process.kill(process.pid, 'SIGKILL');
}

const pool = new Pool({
  max: 8,
  options: '-c idem.wait_timeout=100ms -c statement_timeout=60s',
});
pool.on('error', () => {});

/* A client whose statements are the moments of one request. */
async function connect() {
  const client = await pool.connect();
  const { release } = client;
  let claimed = false;
  client.query = async (text, values) => { // hides the method of the class
    if (text === 'BEGIN') comes('before the claim');
    const sent = client.constructor.prototype.query.call(client, text, values);
    if (claimed && text === 'COMMIT') setImmediate(comes, 'committing');
    const answer = await sent;
    if (text.includes('idem_claim')) ({ claimed } = answer.rows[0]);
    if (claimed && text.includes('idem_claim')) comes('claimed');
    if (claimed && text.includes('idem_complete')) comes('completed');
    if (claimed && text === 'COMMIT') comes('committed');
    return answer;
  };
  client.release = (error) => {
    delete client.query;
    release(error);
  };
  return client;
}

/* The effect: two writes, neither of which could be repeated unnoticed. */
async function order(client, body) {
  const { job, amount } = JSON.parse(body);
  const { rows: [{ id }] } = await client.query(
    'INSERT INTO effect (job) VALUES ($1) RETURNING id', [job]);
  await client.query('UPDATE total SET amount = amount + $1', [amount]);
  comes('handled');
  return {
    status: 201,
    headers: { 'Content-Type': 'application/json', Location: `/orders/${id}`, ETag: `"${id}"` },
    body: JSON.stringify({ id, job, amount, at: process.hrtime.bigint().toString() }),
  };
}

/* As strange as an answer can be. */
async function strange(client) {
  await client.query("INSERT INTO effect (job) VALUES ('strange')");
  return {
    status: 402,
    headers: { 'X-lower-UPPER': 'a "b" \\c', 'Set-Cookie': ['a=1', 'b=2'], 'Content-Type': 'image/x' },
    body: Buffer.from(Array.from({ length: 512 }, (_, i) => i % 256)),
  };
}

/* Waits for whoever holds the advisory lock 1. */
async function slow(client) {
  await client.query("INSERT INTO effect (job) VALUES ('slow')");
  await client.query('SELECT pg_advisory_xact_lock(1)');
  return { status: 200, headers: {}, body: 'slow' };
}

/* Fails until the table "flag" has a row. */
async function failing(client) {
  await client.query("INSERT INTO effect (job) VALUES ('failing')");
  const { rows } = await client.query('SELECT FROM flag');
  if (!rows.length) throw new Error('failing, as it is to');
  return { status: 200, headers: {}, body: '' };
}

const tenantOf = (req) => /^Bearer (ada|bob)$/.exec(req.headers.authorization)?.[1];
const listen = listener({ connect, query: (...args) => pool.query(...args) }, tenantOf, {
  'POST /orders': order, 'PUT /orders': order, 'POST /strange': strange,
  'POST /slow': slow, 'POST /failing': failing,
});

http.createServer((req, res) => {
  const { end } = res;
  requests += 1;
  res.end = (body) => {
    const half = body.length / 2;
    if (deadly !== 'answering' || res.statusCode !== 201) return end.call(res, body);
    return res.write(body.subarray(0, half), () => {
      comes('answering');
      end.call(res, body.subarray(half));
    });
  };
  listen(req, res);
}).listen(0, '127.0.0.1', function listening() {
  writeSync(1, `${this.address().port}\n`);
});
process.on('disconnect', () => process.exit()); // nobody is to be left alone
