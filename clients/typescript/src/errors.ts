/** One word for what went wrong; the API may come to know more of them. */
export type Reason =
  | "invalid_request"
  | "policy_refused"
  | "forbidden"
  | "unauthenticated"
  | "not_found"
  | "conflict"
  | "sandbox_ended"
  | "too_large"
  | "limit_reached"
  | "link_closed"
  | "runtime_failed"
  | "runtime_unavailable"
  | "timeout"
  | "internal_error"
  /** No answer came at all; `cause` says why. */
  | "unreachable"
  | (string & {});

/** A call that failed: the message is a sentence for a person. */
export class AgentboxError extends Error {
  override readonly name = "AgentboxError";

  constructor(
    message: string,
    readonly reason: Reason,
    /** HTTP status; 0 where there was no answer, and of an event stream that broke off. */
    readonly status: number = 0,
    /** The field of the request that is at fault. */
    readonly field: string | null = null,
    /** The administrator's setting that would change it. */
    readonly setting: string | null = null,
    options: { cause?: unknown } = {},
  ) {
    super(message, options);
  }

  /** Read the body of an answer that is an error, whoever has written it. */
  static from(status: number, text: string): AgentboxError {
    try {
      const { message, reason, field, setting } = JSON.parse(text);
      if (typeof message === "string" && typeof reason === "string") {
        return new AgentboxError(message, reason, status, field ?? null, setting ?? null);
      }
    } catch {
      // A proxy in between, or another server.
    }
    return new AgentboxError(`the server answered ${status}: ${text.slice(0, 300)}`, "error", status);
  }
}
