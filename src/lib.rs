//! Retry middleware for RabbitMQ.
