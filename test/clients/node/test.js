'use strict';

/*
 * Real webhook payloads, delivered at least once over failing connections.
 *
 * Each payload of @octokit/webhooks-examples is delivered 1 to 5 times, in a
 * shuffled order, to 8 consumers that handle it with withIdem().  Handlers
 * fail, clients disconnect, backends are terminated, and acknowledgements are
 * lost, at random (but seeded) points; what was not acknowledged is delivered
 * again.  Then the database is compared with what it ought to be.
 *
 * Needs a server with idem installed (the PG* variables say which) and the
 * right to create a database there, which is dropped at the end.
 */

const { parseArgs } = require('node:util');
const { Client, Pool } = require('pg');
const examples = require('@octokit/webhooks-examples');
const { withIdem, shouldRetry } = require('./idem.js');

const { values: options } = parseArgs({
  options: { seed: { type: 'string', default: '1' } },
});
const CONNECTIONS = 8;
const FAULTS = ['rollback', 'disconnect', 'terminate', 'lost acknowledgement'];
const FAULT_RATE = 0.4;
const MOMENTS = ['before', 'during', 'after']; // a statement

const count = {
  deliveries: 0, executed: 0, unseen: 0, replays: 0, identical: 0, overlapping: 0,
  faults: Object.fromEntries(FAULTS.map((kind) => [kind, 0])),
};
const result = { passed: 0, failed: 0 };

function check(what, ok, detail = '') {
  result[ok ? 'passed' : 'failed'] += 1;
  console.log(`${ok ? 'ok    ' : 'FAILED'} ${what}${detail && ` (${detail})`}`);
}

/* Checks that all of a list are as they should be; shows the first that is not. */
function checkAll(what, list, isOk) {
  const bad = list.filter((item) => !isOk(item));
  const detail = bad.length ? `not ${bad.length}, first: ${JSON.stringify(bad[0]).slice(0, 200)}`
    : `all ${list.length}`;
  check(what, list.length > 0 && bad.length === 0, detail);
}

/* mulberry32: a small seeded generator of numbers in [0, 1) */
function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}
const random = generator(Number(options.seed));
const pick = (list) => list[Math.floor(random() * list.length)];

/* The events: one for each payload, with the key that its sender would give. */
const events = Object.values(examples).flatMap(({ name, examples: payloads }) =>
  payloads.map((payload, i) => ({ name, key: `github:${name}:${i}`, payload, answers: [] })));

/* Who delivers: each event 1 to 5 times, shuffled, a third of them in bursts. */
function shuffledDeliveries() {
  const deliveries = events.flatMap((event, i) => {
    const place = random();
    return Array.from({ length: 1 + Math.floor(random() * 5) }, () =>
      ({ event, order: i % 3 === 0 ? place : random() }));
  });
  return deliveries.sort((a, b) => a.order - b.order);
}

/* The effect: two writes, neither of which could be repeated unnoticed. */
async function handle(client, { name, payload, key }) {
  const { rows: [{ id }] } = await client.query(
    'INSERT INTO effect (key, payload) VALUES ($1, $2::json) RETURNING id',
    [key, JSON.stringify(payload)]);
  await client.query('UPDATE total SET events = events + 1 WHERE name = $1', [name]);
  return { effect: id, payload };
}

/*
 * What may go wrong with one delivery: which fault, at which of withIdem's
 * statements, when.  COMMIT (5, or 2 of a replay) is where it matters most.
 */
function planFault() {
  const fault = {
    kind: pick(FAULTS),
    statement: pick([0, 1, 2, 3, 4, 5, 5, 5]),
    moment: pick(MOMENTS),
  };
  if (fault.kind === 'rollback') { // somewhere between BEGIN and COMMIT
    fault.statement = Math.max(fault.statement, 1);
    fault.moment = 'before';
  }
  return random() < FAULT_RATE ? fault : null;
}

/* A pool whose next client meets the planned fault. */
function faultyPool(pool, admin, fault) {
  if (!fault || fault.kind === 'lost acknowledgement') return pool;

  async function strike(client) {
    count.faults[fault.kind] += 1;
    if (fault.kind === 'rollback') throw new HandlerFailed();
    if (fault.kind === 'disconnect') client.connection.stream.destroy();
    else await admin.query('SELECT pg_terminate_backend($1)', [client.processID]);
  }

  return {
    async connect() {
      const client = await pool.connect();
      const { release } = client;
      let statement = 0;
      client.query = async (...args) => { // hides the method of the class
        const struck = statement++ === fault.statement;
        if (struck && fault.moment === 'before') await strike(client);
        const answer = client.constructor.prototype.query.apply(client, args);
        if (!struck || fault.moment === 'before') return answer;
        if (fault.moment === 'after') await answer;
        const [done, blow] = await Promise.allSettled([answer, strike(client)]);
        if (done.reason ?? blow.reason) throw done.reason ?? blow.reason;
        if (fault.kind === 'disconnect') throw new AnswerLost();
        return done.value;
      };
      client.release = (error) => {
        delete client.query;
        release(error);
      };
      return client;
    },
  };
}

class HandlerFailed extends Error {}

/* The server did it, and answered, but nobody was there any more. */
class AnswerLost extends Error {
  code = 'ECONNRESET';
}

/* Takes deliveries until none is left; what fails is delivered again, later. */
async function consume(queue, pool, admin, running) {
  for (let delivery; (delivery = queue.shift());) {
    const { event } = delivery;
    const fault = planFault();
    count.deliveries += 1;
    if (running.has(event.key)) count.overlapping += 1;
    running.set(event.key, (running.get(event.key) ?? 0) + 1);
    try {
      const answer = await withIdem(faultyPool(pool, admin, fault), event.key,
        event.payload, (client) => handle(client, event));
      event.answers.push(answer);
      if (fault?.kind === 'lost acknowledgement') {
        count.faults[fault.kind] += 1;
        queue.push(delivery);
      }
    } catch (error) {
      if (!(error instanceof HandlerFailed) && !shouldRetry(error)) throw error;
      queue.push(delivery);
    } finally {
      const others = running.get(event.key) - 1;
      if (others) running.set(event.key, others); else running.delete(event.key);
    }
  }
}

/* Compares the database, and all answers, with the payloads. */
async function verify(db) {
  const effects = new Map();
  for (const row of (await db.query('SELECT id, key FROM effect')).rows) {
    effects.set(row.key, [...(effects.get(row.key) ?? []), row.id]);
  }
  for (const event of events) {
    const { rows } = await db.query(
      'SELECT result::text AS result FROM idem_lookup($1)', [event.key]);
    event.stored = rows[0]?.result;
    event.effects = effects.get(event.key) ?? [];
  }
  const answers = events.flatMap((event) =>
    event.answers.map((answer) => ({ key: event.key, stored: event.stored, ...answer })));
  const replays = answers.filter((answer) => !answer.claimed);
  const identical = ({ stored, result: bytes }) => typeof stored === 'string'
    && Buffer.from(stored).equals(Buffer.from(bytes ?? ''));
  count.executed = answers.length - replays.length;
  count.replays = replays.length;
  count.unseen = events.filter((event) => event.answers.every((a) => !a.claimed)).length;
  count.identical = replays.filter(identical).length;

  checkAll('each event has its effect once', events, (e) => e.effects.length === 1);
  check('no effect belongs to anything else', effects.size === events.length);
  checkAll('what is stored is what the handler returned, byte for byte', events,
    (e) => e.stored === JSON.stringify({ effect: e.effects[0], payload: e.payload }));
  checkAll('each event was answered', events, (e) => e.answers.length > 0);
  checkAll('no event was executed twice', events,
    (e) => e.answers.filter((answer) => answer.claimed).length <= 1);
  checkAll('each replay is what is stored, byte for byte', replays, identical);
  checkAll('each first answer is what is stored, byte for byte',
    answers.filter((answer) => answer.claimed), identical);
  const { rows: totals } = await db.query('SELECT name, events FROM total');
  checkAll('each total counts its events once', totals,
    ({ name, events: n }) => n === events.filter((event) => event.name === name).length);
}

/* The same request spelled otherwise is replayed; another request is refused. */
async function verifyRequests(pool, db) {
  const reverse = (value) => (Array.isArray(value) ? value.map(reverse)
    : value === null || typeof value !== 'object' ? value
      : Object.fromEntries(Object.entries(value).reverse().map(([k, v]) => [k, reverse(v)])));
  const run = (event, request) =>
    withIdem(pool, event.key, request, (client) => handle(client, event))
      .catch((error) => error.code ?? String(error));
  const outcomes = [];
  for (const event of events) {
    outcomes.push({
      stored: event.stored,
      reversed: await run(event, reverse(event.payload)),
      differing: await run(event, { ...event.payload, tampered: true }),
    });
  }
  checkAll('a request with its members in another order is replayed', outcomes,
    ({ stored, reversed }) => reversed.claimed === false && reversed.result === stored);
  checkAll('a request that differs is refused with ID001', outcomes,
    ({ differing }) => differing === 'ID001');
  const { rows: [{ n }] } = await db.query('SELECT count(*)::int AS n FROM effect');
  check('neither has left an effect', n === events.length);
}

/* Mistakes that a program can make are told apart by their SQLSTATE. */
async function verifyErrors(pool) {
  const client = await pool.connect();
  const codeOf = (...query) => client.query(...query).then(() => 'none', (error) => error.code);
  check('an empty key is 22023', await codeOf('SELECT * FROM idem_claim($1)', ['']) === '22023');
  check('no key is 22004', await codeOf('SELECT * FROM idem_claim($1)', [null]) === '22004');
  check('completing without a claim is ID005',
    await codeOf('SELECT idem_complete($1, $2::json)', ['unclaimed', '1']) === 'ID005');
  check('a claim in autocommit is ID006',
    await codeOf('SELECT * FROM idem_claim($1)', ['unfinished']) === 'ID006');
  client.release();
}

async function main() {
  const database = `idem_node_${process.pid}`;
  const server = new Client();
  await server.connect();
  await server.query(`CREATE DATABASE ${database}`);
  const settings = { database, options: '-c statement_timeout=60s' }; // if it hangs
  const pool = new Pool({ ...settings, max: CONNECTIONS });
  const admin = new Pool({ ...settings, max: CONNECTIONS });
  pool.on('error', () => {}); // a connection was terminated after its use
  admin.on('error', () => {});
  try {
    await admin.query(`CREATE EXTENSION idem;
      CREATE TABLE effect (id int GENERATED ALWAYS AS IDENTITY, key text, payload json);
      CREATE TABLE total (name text PRIMARY KEY, events int NOT NULL DEFAULT 0)`);
    await admin.query('INSERT INTO total SELECT DISTINCT unnest($1::text[])',
      [events.map((event) => event.name)]);

    const queue = shuffledDeliveries();
    console.log(`${events.length} payloads, ${queue.length} deliveries planned, `
      + `${CONNECTIONS} connections, seed ${options.seed}`);
    const running = new Map();
    await Promise.all(Array.from({ length: CONNECTIONS },
      () => consume(queue, pool, admin, running)));

    await verify(admin);
    for (const kind of FAULTS) {
      check(`fault: ${kind}`, count.faults[kind] > 0, String(count.faults[kind]));
    }
    await verifyRequests(pool, admin);
    await verifyErrors(pool);
  } finally {
    await Promise.all([pool.end(), admin.end()]);
    await server.query(`DROP DATABASE ${database} WITH (FORCE)`);
    await server.end();
  }

  console.log(`\ndeliveries                    ${count.deliveries}`
    + `\n  while the same key ran      ${count.overlapping}`);
  for (const kind of FAULTS) console.log(`fault: ${kind.padEnd(22)} ${count.faults[kind]}`);
  console.log(`executed and answered         ${count.executed}`
    + `\nexecuted, answer never seen   ${count.unseen}`
    + `\nreplays                       ${count.replays}`
    + `\nbyte-identical replays        ${count.identical}\n`);
}

main().catch((error) => {
  check('the test runs to its end', false, error.stack);
}).finally(() => {
  console.log(`${result.passed} passed, ${result.failed} failed`);
  process.exitCode = result.failed || !result.passed ? 1 : 0;
});
