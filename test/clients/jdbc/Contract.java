import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.sql.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.stream.Stream;

/**
 * Plays a file of test/clients/contract/ through PostgreSQL's JDBC driver.
 *
 *     java Contract FILE PREFIX PORT LOST-REPLY-PORT LOST-REQUEST-PORT [OPTION]...
 *
 * Options are parameters of the connection (autosave=always,
 * preferQueryMode=simple, prepareThreshold=1, ...), and pooling=MODE, which only
 * says which cases are wanted.
 *
 * The last line is "N passed, N failed".
 */
public class Contract {
    static final int PATIENCE = 60; // seconds

    /** The contract is. */
    static class Broken extends RuntimeException {
        Broken(String why) { super(why); }
    }

    static class Step {
        int number;
        String connection, verb, rest, error, keep;
        boolean lost;
        List<Object> arguments = new ArrayList<>();
        List<String> rows;

        void detail(String word, String rest) {
            switch (word) {
                case "arg" -> arguments.add(rest);
                case "int" -> arguments.add(Integer.valueOf(rest));
                case "null" -> arguments.add(null);
                case "array" -> arguments.add(Stream.of(rest.split("\\|"))
                    .map(item -> item.equals("NULL") ? null : item).toArray(String[]::new));
                case "row" -> {
                    if (rows == null) rows = new ArrayList<>();
                    rows.add(rest);
                }
                case "no" -> rows = new ArrayList<>();
                case "error" -> error = rest;
                case "keep" -> keep = rest;
                case "lost" -> lost = true;
                default -> throw new Broken("what is " + word + "?");
            }
        }
    }

    static class Case {
        String title;
        boolean wanted = true;
        List<Step> steps = new ArrayList<>();
    }

    static String[] cut(String text) {
        String[] parts = text.split(" ", 2);
        return parts.length == 2 ? parts : new String[] {parts[0], ""};
    }

    static List<Case> readCases(Path file, List<String> options) throws IOException {
        List<Case> cases = new ArrayList<>();
        int number = 0;
        for (String line : Files.readAllLines(file)) {
            number++;
            if (line.isBlank() || line.startsWith("#")) continue;
            String[] words = cut(line.stripLeading());
            if (line.startsWith("== ")) {
                Case one = new Case();
                one.title = words[1];
                cases.add(one);
                continue;
            }
            Case current = cases.get(cases.size() - 1);
            if (!line.startsWith(" ")) {
                Step step = new Step();
                step.number = number;
                step.connection = words[0];
                String[] verb = cut(words[1]);
                step.verb = verb[0];
                step.rest = verb[1];
                current.steps.add(step);
            } else if (!current.steps.isEmpty()) {
                current.steps.get(current.steps.size() - 1).detail(words[0], words[1]);
            } else if (options.contains(words[1]) != words[0].equals("only")) {
                current.wanted = false;
            }
        }
        cases.removeIf(one -> !one.wanted);
        return cases;
    }

    final Map<String, String> names = new HashMap<>();
    final Map<String, Connection> connections = new HashMap<>();
    final Map<String, Savepoint> savepoints = new HashMap<>();
    final Map<String, Future<List<String>>> started = new HashMap<>();
    static final ExecutorService threads = Executors.newCachedThreadPool();
    static Map<String, String> ports;
    static String parameters;

    String fill(String text) {
        if (text == null) return null;
        for (Map.Entry<String, String> name : names.entrySet())
            text = text.replace("{" + name.getKey() + "}", name.getValue());
        return text;
    }

    Connection connection(String name) throws SQLException {
        Connection known = connections.get(name);
        if (known == null) {
            String port = ports.getOrDefault(name, ports.get("plain"));
            known = DriverManager.getConnection(
                "jdbc:postgresql://127.0.0.1:" + port + "/" + System.getenv("PGDATABASE")
                + "?user=" + System.getenv("PGUSER") + parameters);
            connections.put(name, known);
        }
        return known;
    }

    static String asText(Object value) {
        if (value == null) return "NULL";
        if (value instanceof Boolean) return (Boolean) value ? "t" : "f";
        return value.toString();
    }

    /** The rows of an answer, null where there can be none. */
    List<String> query(Connection conn, Step step) throws SQLException {
        String sql = step.rest.replaceAll("\\$\\d+", "?");
        try (PreparedStatement statement = conn.prepareStatement(sql)) {
            int number = 0;
            for (Object argument : step.arguments) {
                number++;
                if (argument instanceof Integer)
                    statement.setInt(number, (Integer) argument);
                else if (argument instanceof String[]) {
                    Object[] items = Stream.of((String[]) argument).map(this::fill).toArray();
                    statement.setArray(number, conn.createArrayOf("text", items));
                } else
                    statement.setString(number, fill((String) argument));
            }
            if (!statement.execute()) return null;
            List<String> rows = new ArrayList<>();
            try (ResultSet result = statement.getResultSet()) {
                int columns = result.getMetaData().getColumnCount();
                while (result.next()) {
                    StringJoiner row = new StringJoiner("|");
                    for (int i = 1; i <= columns; i++) row.add(asText(result.getObject(i)));
                    rows.add(row.toString());
                }
            }
            return rows;
        }
    }

    List<String> play(Step step) throws Exception {
        Connection conn = connection(step.connection);
        switch (step.verb) {
            case "begin" -> {
                conn.setTransactionIsolation(step.rest.isEmpty()
                    ? Connection.TRANSACTION_READ_COMMITTED
                    : Connection.TRANSACTION_REPEATABLE_READ);
                conn.setAutoCommit(false);
            }
            case "commit" -> {
                try {
                    conn.commit();
                } catch (SQLException e) {
                    if (!conn.isClosed()) conn.rollback();
                    throw e;
                } finally {
                    if (!conn.isClosed()) conn.setAutoCommit(true);
                }
            }
            case "savepoint" -> savepoints.put(step.rest, conn.setSavepoint(step.rest));
            case "rollback" -> {
                if (!step.rest.isEmpty()) {
                    conn.rollback(savepoints.get(cut(step.rest)[1]));
                    break;
                }
                conn.rollback();
                conn.setAutoCommit(true);
            }
            case "close" -> conn.close();
            case "start" -> started.put(step.connection, threads.submit(() -> query(conn, step)));
            case "finish" -> {
                try {
                    return started.get(step.connection).get(PATIENCE, TimeUnit.SECONDS);
                } catch (ExecutionException e) {
                    throw (Exception) e.getCause();
                }
            }
            case "run", "until" -> { return query(conn, step); }
            default -> throw new Broken("what is " + step.verb + "?");
        }
        return null;
    }

    boolean asExpected(Step step, List<String> rows) {
        if (step.keep != null) names.put(step.keep, rows.get(0));
        return step.rows == null || step.rows.stream().map(this::fill).toList().equals(rows);
    }

    void check(Step step) throws Exception {
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(PATIENCE);
        String expected = step.lost ? "lost" : step.error;
        String outcome = null, said = "";
        try {
            List<String> rows = play(step);
            while (!asExpected(step, rows)) {
                if (!step.verb.equals("until") || System.nanoTime() > end)
                    throw new Broken("line " + step.number + ": " + rows);
                Thread.sleep(20);
                rows = play(step);
            }
        } catch (SQLException e) {
            outcome = e.getSQLState();
            if (outcome != null && outcome.startsWith("08")) outcome = "lost";
            said = " " + e.getMessage();
        }
        if (!Objects.equals(outcome, expected))
            throw new Broken("line " + step.number + ": "
                + (outcome == null ? "no error" : outcome) + said);
    }

    void run(Case one) throws Exception {
        try {
            for (Step step : one.steps) check(step);
        } finally {
            for (Connection conn : connections.values()) conn.close();
        }
    }

    public static void main(String[] args) throws Exception {
        List<String> options = Arrays.asList(args).subList(5, args.length);
        ports = Map.of("plain", args[2], "lost-reply", args[3], "lost-request", args[4]);
        parameters = String.join("", options.stream()
            .filter(option -> !option.startsWith("pooling=")).map(o -> "&" + o).toList());
        int number = 0, passed = 0, failed = 0;
        for (Case one : readCases(Path.of(args[0]), options)) {
            Contract contract = new Contract();
            contract.names.put("key", args[1] + ":" + ++number);
            try {
                contract.run(one);
                passed++;
                System.out.println("ok - " + one.title);
            } catch (Exception e) {
                failed++;
                System.out.println("not ok - " + one.title + ": " + e);
            }
        }
        System.out.println(passed + " passed, " + failed + " failed");
        System.exit(failed > 0 || passed == 0 ? 1 : 0);
    }
}
