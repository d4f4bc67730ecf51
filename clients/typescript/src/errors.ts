/** Error code. Later versions of the API may add codes. */
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
  /** The server did not respond; `cause` is the underlying error. */
  | "unreachable"
  | (string & {});

/** Error of a failed call, with a message for people. */
export class AgentboxError extends Error {
  override readonly name = "AgentboxError";

  constructor(
    message: string,
    readonly reason: Reason,
    /** HTTP status; 0 if the server did not respond, or if an event stream was interrupted. */
    readonly status: number = 0,
    /** The invalid field of the request. */
    readonly field: string | null = null,
    /** The administrator's setting that controls this. */
    readonly setting: string | null = null,
    options: { cause?: unknown } = {},
  ) {
    super(message, options);
  }

  /** Create an error from the body of an error response, of this API or of a proxy. */
  static from(status: number, text: string): AgentboxError {
    try {
      const { message, reason, field, setting } = JSON.parse(text);
      if (typeof message === "string" && typeof reason === "string") {
        return new AgentboxError(message, reason, status, field ?? null, setting ?? null);
      }
    } catch {
      // The response is from a proxy or another server.
    }
    return new AgentboxError(`the server responded with status ${status}: ${text.slice(0, 300)}`, "error", status);
  }
}
