"""What Spark wants of a JVM, besides memory."""

from __future__ import annotations

WITHOUT_SECURITY_ACTION = 25  # the first Java that no longer has that package
_SECURITY_ACTION = "java.base/sun.security.action"
GARBAGE_COLLECTOR = "-XX:+UseParallelGC"  # a fifth faster than the others on micro-batches, and smaller
KNOWN_SPARK = "4.3."

# As `spark-class` has it; a test compares. Left out on purpose: --add-modules=jdk.incubator.vector, which small
# runtimes lack, which makes others print a warning at every start, and which only MLlib's linear algebra would use.
SPARK_FLAGS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(
        f"--add-opens={package}=ALL-UNNAMED"
        for package in (
            "java.base/java.lang",
            "java.base/java.lang.invoke",
            "java.base/java.lang.reflect",
            "java.base/java.io",
            "java.base/java.net",
            "java.base/java.nio",
            "java.base/java.util",
            "java.base/java.util.concurrent",
            "java.base/java.util.concurrent.atomic",
            "java.base/jdk.internal.ref",
            "java.base/sun.nio.ch",
            "java.base/sun.nio.cs",
            _SECURITY_ACTION,
            "java.base/sun.util.calendar",
            "java.security.jgss/sun.security.krb5",
        )
    ),
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
    "-Dderby.connection.requireAuthentication=false",
)


def spark_flags(feature: int) -> list[str]:
    """Those of Spark, but for one that newer Javas only warn about."""
    return [flag for flag in SPARK_FLAGS if feature < WITHOUT_SECURITY_ACTION or _SECURITY_ACTION not in flag]
