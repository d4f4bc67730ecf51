export * from "./client.js";
export { AgentboxError, type Reason } from "./errors.js";
export { ROUTES, type components, type EventStreams, type operations, type paths } from "./schema.js";
export type { Answer, Arguments, Body, ClientOptions, EventOf, OperationName, Query } from "./transport.js";
