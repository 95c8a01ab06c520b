import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.Collectors;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/** Sends requests by HttpClient, half of them streamed, and prints counts by outcome as JSON. */
public final class Requests {
  private static final int REQUESTS_PER_CLIENT = 10; // requests per client, and so per connection

  private final Map<String, String> env = System.getenv();
  private final AtomicInteger whole = new AtomicInteger();
  private final AtomicInteger streamed = new AtomicInteger();
  private final AtomicInteger failed = new AtomicInteger();
  private final ConcurrentLinkedQueue<String> errors = new ConcurrentLinkedQueue<>();

  public static void main(String[] arguments) throws Exception {
    new Requests().run();
  }

  private void run() throws Exception {
    SSLContext trust = trust(Path.of(env.get("CA")));
    int count = Integer.parseInt(env.get("COUNT")), threads = Integer.parseInt(env.get("THREADS"));
    var pool = Executors.newFixedThreadPool(threads);
    for (int thread = 0; thread < threads; thread++) {
      pool.submit(() -> ask(trust, count / threads));
    }
    pool.shutdown();
    pool.awaitTermination(10, TimeUnit.MINUTES);
    String told = errors.stream().limit(5).map(Requests::quoted).collect(Collectors.joining(", "));
    System.out.printf("{\"whole\": %s, \"streamed\": %s, \"failed\": %s, \"errors\": [%s]}%n", whole, streamed, failed, told);
  }

  private void ask(SSLContext trust, int count) {
    HttpClient client = null;
    for (int number = 0; number < count; number++) {
      if (number % REQUESTS_PER_CLIENT == 0) {
        client = HttpClient.newBuilder().sslContext(trust).connectTimeout(Duration.ofSeconds(20)).build();
      }
      boolean stream = number % 2 == 1;
      try {
        HttpRequest request = HttpRequest.newBuilder(URI.create(env.get("URL") + "/v1/chat/completions"))
            .timeout(Duration.ofSeconds(60))
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(env.get(stream ? "STREAMED" : "WHOLE")))
            .build();
        check(stream, client, request);
        (stream ? streamed : whole).incrementAndGet();
      } catch (Exception | AssertionError error) {
        failed.incrementAndGet();
        errors.add(String.valueOf(error));
      }
    }
  }

  /** Throws if the answer does not contain the expected text. */
  private void check(boolean stream, HttpClient client, HttpRequest request) throws Exception {
    List<String> lines;
    int status;
    if (stream) {
      var answer = client.send(request, HttpResponse.BodyHandlers.ofLines());
      status = answer.statusCode();
      lines = answer.body().filter(line -> !line.isEmpty()).collect(Collectors.toList());
    } else {
      var answer = client.send(request, HttpResponse.BodyHandlers.ofString());
      status = answer.statusCode();
      lines = List.of(answer.body());
    }
    if (status != 200) throw new AssertionError("status " + status + ": " + lines);
    if (stream && !lines.get(lines.size() - 1).equals("data: [DONE]")) throw new AssertionError("no [DONE]");
    String text = lines.stream().map(Requests::content).collect(Collectors.joining());
    if (!text.equals(env.get("EXPECTED"))) throw new AssertionError("another text: " + text);
  }

  /** Returns the value of the member `content`; the mock's texts contain no escapes. */
  private static String content(String json) {
    String mark = "\"content\":";
    int at = json.indexOf(mark);
    if (at < 0) return "";
    String rest = json.substring(at + mark.length()).stripLeading();
    return rest.startsWith("\"") ? rest.substring(1, rest.indexOf('"', 1)) : "";
  }

  private static SSLContext trust(Path file) throws Exception {
    KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
    store.load(null, null);
    try (var in = Files.newInputStream(file)) {
      store.setCertificateEntry("authority", CertificateFactory.getInstance("X.509").generateCertificate(in));
    }
    var factory = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
    factory.init(store);
    var context = SSLContext.getInstance("TLS");
    context.init(null, factory.getTrustManagers(), null);
    return context;
  }

  private static String quoted(String text) {
    return "\"" + text.replaceAll("[^ -~]|[\"\\\\]", "?") + "\"";
  }
}
